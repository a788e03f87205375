"""Eagle3 and MTP: what training-time test trains is what `extend` and `propose` serve, token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax import MTP, Eagle3, Eagle3Config, MTPConfig, Sampling
from dspark_jax.drafters.autoregressive import Autoregressive

D, G = 16, 4
SHAPE = {
    "vocab_size": 40, "hidden_size": D, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "block_size": G, "num_target_layers": 2,
}  # fmt: skip


def make(kind: str, **changes) -> Autoregressive:
    if kind == "mtp":
        return MTP(MTPConfig(**{**SHAPE, **changes}), rngs=nnx.Rngs(0))
    return Eagle3(Eagle3Config(**{**SHAPE, "tap_ids": (-1, 0), **changes}), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_serving_equals_training(tiny_target, kind):
    """Blocks at four anchors, one a row, in a document behind another one; context comes in chunks of any size."""
    drafter = make(kind)
    anchors, length, before = jnp.array([1, 7, 18, 25]), 32, 9
    rows = jnp.arange(4)
    read = jax.random.normal(jax.random.key(1), (4, length, (2 if kind == "eagle3" else 1) * D))
    tokens = jax.random.randint(jax.random.key(0), (4, length), 0, 37)

    @jax.jit
    def serve(drafter):
        cache, start = drafter.create_cache(4, length + G), 0
        for size in (1, 4, 16, 5):
            at = jnp.broadcast_to(start + jnp.arange(size), (4, size))
            chunk, start = slice(start, start + size), start + size
            known = jnp.where(at < anchors[:, None], at, -1)
            cache = drafter.extend(cache, read[:, chunk], known, tiny_target.embed(tokens[:, chunk]))
        keys = jax.random.split(jax.random.key(0), (4, G))
        head, sampling = drafter.draft_head(tiny_target), Sampling.create(4)
        return drafter.propose(tiny_target, head, cache, tokens[rows, anchors], anchors, sampling, keys)[0]

    @jax.jit
    def train(drafter, tokens):
        other = jax.random.randint(jax.random.key(2), (4, before), 0, 37)
        states = jnp.pad(read, ((0, 0), (before, 0), (0, 0)), constant_values=3.0)
        positions = jnp.broadcast_to(jnp.concatenate([jnp.arange(before), jnp.arange(length)]), (4, before + length))
        segments = (jnp.arange(before + length) >= before).astype(int)
        hidden = drafter.blocks(
            tiny_target, jnp.concatenate([other, tokens], axis=1), states, anchors[:, None] + before, positions,
            jnp.broadcast_to(segments, positions.shape),
        )[:, 0]  # fmt: skip
        return drafter.base_logits(tiny_target, drafter.draft_head(tiny_target), hidden)

    served = serve(drafter)
    drafted = tokens.at[rows[:, None], anchors[:, None] + 1 + jnp.arange(G)].set(served.tokens)
    trained = train(drafter, drafted)
    np.testing.assert_allclose(served.logits[..., :37], trained[..., :37], rtol=0, atol=2e-5)
    assert np.ptp(np.asarray(trained[..., :37]), axis=0).min() > 1e-3, "the blocks must differ to say anything"
    assert np.isposinf(served.confidence_logits).all(), "without a confidence head every draft is trusted"


def test_first_token_of_a_document_has_no_state_before_it(tiny_target):
    """A block at position 0 does not read the document before, which ends just there."""
    drafter = make("eagle3")
    tokens = jax.random.randint(jax.random.key(0), (1, 12), 0, 37)
    positions, segments = jnp.array([[*range(5), *range(7)]]), jnp.array([[0] * 5 + [1] * 7])
    read = jax.random.normal(jax.random.key(1), (1, 12, 2 * D))
    blocks = jax.jit(lambda read: drafter.blocks(tiny_target, tokens, read, jnp.array([[5]]), positions, segments))
    np.testing.assert_array_equal(blocks(read), blocks(read.at[:, :5].set(7.0)))


def test_mtp_1_repeated_drafts_its_own_token_first(tiny_target):
    single = make("mtp", block_size=1)
    tokens, positions = jnp.array([[3, 9, 4, 30]]), jnp.arange(4)[None]
    read = jax.random.normal(jax.random.key(1), (1, 4, D))
    found = []
    for drafter in (single, single.repeated(3), single.repeated(5)):
        cache = drafter.extend(drafter.create_cache(1, 16), read, positions, tiny_target.embed(tokens))
        keys = jax.random.split(jax.random.key(0), (1, drafter.config.block_size))
        arguments = (drafter.draft_head(tiny_target), cache, jnp.array([7]), jnp.array([4]), Sampling.create(1), keys)
        found.append(drafter.propose(tiny_target, *arguments)[0].logits[0, :, :37])
    assert [len(logits) for logits in found] == [1, 3, 5]
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-6)
    np.testing.assert_allclose(found[1], found[2][:3], atol=1e-6)
    assert single.config.block_size == 1
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        single.repeated(0)


def test_shapes_outside_what_was_trained_are_refused(tiny_target):
    drafter = make("eagle3")
    arguments = (drafter.create_cache(1, 16), jnp.zeros(1, int), jnp.ones(1, int), Sampling.create(1))
    for size in (0, G + 1):
        with pytest.raises(ValueError, match=rf"within 1\.\.{G}"):
            drafter.propose(tiny_target, drafter.draft_head(tiny_target), *arguments, None, size)
    for changes in ({"block_size": 0}, {"step_decay": 0.0}, {"draft_vocab_size": 41}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            dataclasses.replace(drafter.config, **changes)
    with pytest.raises(ValueError, match="expected no taps"):
        MTPConfig(**SHAPE, tap_ids=(0,))
