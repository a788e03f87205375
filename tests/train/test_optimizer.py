"""Which parameters Muon orthogonalises, and that the others are AdamW's."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from train.loop import Trainer


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
