"""A warm start computes what the target's layers compute, and starts without what they do not know."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafters.kinds import build_drafter
from train.config import RunConfig
from train.losses import LossWeights
from train.warm_start import warm_start

LAYER = 1
SAMPLE = np.arange(48).reshape(2, 24)


@pytest.fixture(scope="module")
def start(disk_target):
    """start(kind, **fields): a drafter at random, started from layer 1 of the tiny target."""
    from flax import nnx

    def build(kind: str, layers=(LAYER,), **fields):
        test = LossWeights.training_time_test()
        fields |= {"markov_rank": 8} if kind == "dspark" else {"markov_rank": 0, "weights": test}
        taps = () if kind == "mtp" else (0, 1)
        run = RunConfig("x", kind=kind, num_layers=1, tap_ids=taps, mask_token_id=1, draft_vocab_size=0, **fields)
        drafter = build_drafter(run.drafter(disk_target.model.config), rngs=nnx.Rngs(3))
        warm_start(drafter, disk_target.model, layers, jnp.asarray(SAMPLE))
        return drafter

    return build


@pytest.fixture(scope="module")
def inputs(disk_target):
    """What layer 1 of the target reads on the sample, and the final hidden states."""
    target = disk_target.model
    positions = jnp.broadcast_to(jnp.arange(SAMPLE.shape[1]), SAMPLE.shape)
    final, tap, _ = target(jnp.asarray(SAMPLE), positions, target.create_cache(*SAMPLE.shape), (LAYER - 1,))
    return tap, final


@pytest.mark.parametrize("wider", [0, 40])
@pytest.mark.parametrize("kind", ["dspark", "eagle3", "mtp"])
def test_the_mlp_is_the_targets_however_wide(disk_target, start, inputs, kind, wider):
    source = disk_target.model.layers[LAYER]
    drafter = start(kind, intermediate_size=disk_target.model.config.intermediate_size + wider)
    layer = drafter.layers[0] if kind == "dspark" else drafter.layer
    x = inputs[0]
    np.testing.assert_allclose(layer.mlp(layer.mlp_norm(x)), source.mlp(source.mlp_norm(x)), atol=1e-5)
    if wider:
        assert np.ptp(layer.mlp.gate_up.weight[...], axis=1).min() > 0, "further units must be able to learn"


def test_eagle3_attends_as_the_targets_layer_whatever_the_embedding(disk_target, start, inputs):
    source, drafter, x = disk_target.model.layers[LAYER], start("eagle3"), inputs[0]
    state = drafter.project(jnp.concatenate([jnp.ones_like(x), x], axis=-1))
    np.testing.assert_allclose(state, x, atol=1e-6)
    noise = jax.random.normal(jax.random.key(0), x.shape)
    v = drafter.layer.attention.split(drafter.enter(noise, state)[1])[2]
    np.testing.assert_allclose(v, source.attention.split(source.attention_norm(x))[2], atol=1e-5)


def test_mtp_reads_the_final_state_at_the_size_of_the_layers_inputs(start, inputs):
    x, final = inputs
    drafter = start("mtp")
    noise = jax.random.normal(jax.random.key(0), x.shape)
    stream, _ = drafter.enter(noise, drafter.project(final))
    np.testing.assert_array_equal(stream, drafter.enter(2 - noise, drafter.project(final))[0])
    left = x - stream
    assert jnp.sum(left**2) < jnp.sum(x**2), "closer to what the layer reads than nothing is"
    np.testing.assert_allclose(jnp.mean(left * stream, axis=(0, 1)), 0, atol=1e-5)


def test_a_narrower_mlp_and_a_layer_that_is_not_there_are_refused(disk_target, start):
    with pytest.raises(ValueError, match="intermediate_size of at least the target's"):
        start("eagle3", intermediate_size=disk_target.model.config.intermediate_size - 1)
    with pytest.raises(ValueError, match=r"warm_start layers \[9\] are not in"):
        start("mtp", layers=(9,))
