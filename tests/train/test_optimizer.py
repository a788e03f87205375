"""Which parameters Muon orthogonalises, and that the others are AdamW's; the average of the parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dspark_jax.checkpoints.drafter import load_drafter
from train.loop import Trainer
from train.optimizer import parameter_average


@pytest.fixture
def second_update(tiny_run, disk_target, tmp_path):
    """second_update(optimizer): what the second step adds to every parameter (the first has rate 0)."""

    def run(optimizer):
        fields = {"optimizer": optimizer, "out": str(tmp_path / optimizer)}
        trainer = Trainer(dataclasses.replace(tiny_run, **fields), disk_target.model)
        trainer.train(until=1)
        before = jax.tree.map(np.array, trainer.state.params)
        trainer.train(until=2)
        change = jax.tree.map(lambda a, b: np.asarray(a) - b, trainer.state.params, before)
        return {".".join(map(str, path)): value[...] for path, value in nnx.to_flat_state(change)}

    return run


def test_muon_orthogonalises_the_backbone_and_leaves_the_rest_to_adamw(second_update):
    muon, adamw = second_update("muon"), second_update("adamw")
    matrices = {name for name, value in muon.items() if value.ndim == 2 and name.startswith(("layers.", "fc."))}
    assert {"fc.weight", "layers.0.attention.qkv.weight", "layers.0.mlp.down.weight"} <= matrices < muon.keys()
    for name in muon:
        if name in matrices:
            # Newton-Schulz brings most singular values near one another, up to the smallest of a small matrix.
            near, raw = (np.linalg.svd(x[name], compute_uv=False) for x in (muon, adamw))
            assert np.median(near) > 0.6 * near[0] and np.median(raw) < 0.6 * raw[0], (name, near, raw)
        else:
            np.testing.assert_allclose(muon[name], adamw[name], rtol=1e-4, atol=1e-8, err_msg=name)


def test_the_average_weighs_updates_by_their_age():
    tx = optax.chain(optax.sgd(0.1), parameter_average(0.7))
    params = {"w": jnp.array([1.0, -2.0])}
    state, seen = tx.init(params), []
    np.testing.assert_array_equal(state[-1].params["w"], params["w"])
    for gradient in np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32):
        updates, state = tx.update({"w": gradient}, state, params)
        np.testing.assert_array_equal(updates["w"], np.float32(-0.1) * gradient)
        params = optax.apply_updates(params, updates)
        seen.append(np.asarray(params["w"]))
        weights = 0.7 ** np.arange(len(seen))[::-1]
        np.testing.assert_allclose(state[-1].params["w"], weights @ seen / weights.sum(), rtol=1e-6)


@pytest.mark.slow
def test_the_average_is_exported_and_resumes(tiny_run, disk_target, tmp_path):
    decay = 0.7

    def start(out):
        run = dataclasses.replace(tiny_run, ema=decay, learning_rate=3e-2, checkpoint_every=2, out=str(tmp_path / out))
        return Trainer(run, disk_target.model)

    whole, seen = start("whole"), []
    for until in range(1, 5):
        whole.train(until=until)
        seen.append(jax.tree.map(np.array, whole.state.params))
    weights = decay ** np.arange(3, -1, -1)
    by_hand = jax.tree.map(lambda *x: np.tensordot(weights / weights.sum(), np.stack(x), axes=1), *seen)
    average = nnx.state(whole.drafter, nnx.Param)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), average, by_hand)
    apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), average, seen[-1])
    assert max(jax.tree.leaves(apart)) > 1e-3
    exported = load_drafter(whole.export(dtype=jnp.float32), target=disk_target.model)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(exported, nnx.Param), average)

    start("parts").train(until=2)
    resumed = start("parts")
    resumed.train(until=4)
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    with pytest.raises(ValueError, match=r"ema.*0\.7, 0\.0"):
        Trainer(dataclasses.replace(resumed.run, ema=0.0), disk_target.model)
    with pytest.raises(ValueError, match=r"within 0\.\.1, 1 excluded, got 1"):
        dataclasses.replace(tiny_run, ema=1.0)
