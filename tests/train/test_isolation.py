"""A block sees its own document strictly before its anchor, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.step import TokenBatch, target_features

DOCUMENTS = (9, 3, 20)
T = 40


@pytest.fixture(params=[0, 1], ids=["anchor slot first", "mask slot first"])
def scene(request, tiny_target, make_drafter):
    """A drafter, three documents and padding in a row, anchors in all of them, and the program under test."""
    drafter = make_drafter(tiny_target, first_slot=request.param)
    segments = np.repeat([0, 1, 2, -1], [*DOCUMENTS, T - sum(DOCUMENTS)])[None]
    positions = np.concatenate([*map(np.arange, DOCUMENTS), np.zeros(T - sum(DOCUMENTS), int)])[None]
    tokens = np.random.default_rng(0).integers(37, size=(1, T))
    taps = np.random.default_rng(1).normal(size=(1, T, 2 * 16)).astype(np.float32)
    anchors = np.array([[0, 4, 8, 9, 11, 12, 20, 31]])

    @jax.jit
    def logits(tokens, taps):
        out = drafter.blocks(tiny_target, tokens, taps, anchors, positions, segments)
        return drafter.base_logits(tiny_target, drafter.draft_head(tiny_target), out)[0, ..., :37]

    return logits, tokens, taps, anchors[0], segments[0]


def scramble(tokens, taps, where):
    """Other tokens and hidden states at the positions `where`."""
    draw = np.random.default_rng(2)
    return (
        np.where(where, (tokens + draw.integers(1, 37, size=tokens.shape)) % 37, tokens),
        np.where(where[:, None], 100 * draw.normal(size=taps.shape).astype(np.float32), taps),
    )


def test_answers_are_invisible(scene):
    logits, tokens, taps, anchors, _ = scene
    before = logits(tokens, taps)
    for block, anchor in enumerate(anchors):
        # The anchor's token is the block's input; its hidden state is not known when the block is drafted.
        other_tokens, other_taps = scramble(tokens, taps, np.arange(T) >= anchor)
        other_tokens[0, anchor] = tokens[0, anchor]
        after = logits(other_tokens, other_taps)
        np.testing.assert_array_equal(after[block], before[block])


def test_other_documents_are_invisible(scene):
    logits, tokens, taps, anchors, segments = scene
    before = logits(tokens, taps)
    for block, anchor in enumerate(anchors):
        after = logits(*scramble(tokens, taps, segments != segments[anchor]))
        np.testing.assert_array_equal(after[block], before[block])


def test_context_is_visible(scene):
    logits, tokens, taps, anchors, segments = scene
    before = logits(tokens, taps)
    for block, anchor in enumerate(anchors):
        for at in range(T):
            if at < anchor and segments[at] == segments[anchor] and (at == anchor - 1 or at % 5 == 0):
                after = logits(tokens, scramble(tokens, taps, np.arange(T) == at)[1])
                assert np.abs(after[block] - before[block]).max() > 1e-4, (anchor, at)


def test_target_features_of_packed_documents_are_those_of_each_alone(tiny_target):
    draw = np.random.default_rng(3)
    first, second = draw.integers(37, size=9), draw.integers(37, size=14)
    run = jax.jit(lambda batch: target_features(tiny_target, batch, (-1, 0)))
    packed = run(packed_batch(first, second))
    other = run(packed_batch(draw.integers(37, size=9), second))
    serve = jax.jit(lambda t, at: tiny_target(t, at, tiny_target.create_cache(1, 16), (-1, 0))[:2])
    alone = serve(jnp.array([[*second, 0, 0]]), jnp.array([[*range(14), -1, -1]]))
    for a, b, c in zip(packed, other, alone, strict=True):
        np.testing.assert_array_equal(a[:, 9:23], b[:, 9:23])
        np.testing.assert_allclose(a[:, 9:23], c[:, :14], atol=1e-5)


def packed_batch(first, second) -> TokenBatch:
    """Two documents of 9 and 14 tokens in a row of 25."""
    tokens = jnp.array([[*first, *second, 0, 0]])
    positions, segments = jnp.array([[*range(9), *range(14), 0, 0]]), jnp.array([[0] * 9 + [1] * 14 + [-1] * 2])
    return TokenBatch(tokens, jnp.ones_like(tokens, bool), positions, segments)


@pytest.mark.parametrize(
    "fields", [{}, {"first_slot": 1}, {"markov_head_type": "rnn"}, {"draft_vocab_size": 20}], ids=str
)
def test_training_and_serving_give_one_block_the_same_logits(tiny_target, make_drafter, fields):
    drafter = make_drafter(tiny_target, **fields)
    c = drafter.config
    draw = np.random.default_rng(4)
    first, second = draw.integers(37, size=9), draw.integers(37, size=14)
    labels = jnp.array([second[6 : 6 + c.block_size]])

    def read(hidden):
        base = drafter.base_logits(tiny_target, drafter.draft_head(tiny_target), hidden)
        return base, drafter.latents(labels, hidden), drafter.confidence_logits(labels, hidden)

    @jax.jit
    def training(batch):
        """The second document's token 6 is the anchor, at 9 + 6 of the row."""
        _, taps = target_features(tiny_target, batch, c.tap_ids)
        anchors = jnp.array([[15]])
        hidden = drafter.blocks(tiny_target, batch.tokens, taps, anchors, batch.positions, batch.segments)
        return read(hidden[:, 0])

    @jax.jit
    def serving(tokens):
        """The second document alone, its first six tokens in the cache."""
        at = jnp.arange(6)[None]
        _, taps, _ = tiny_target(tokens[:, :6], at, tiny_target.create_cache(1, 8), c.tap_ids)
        cache = drafter.extend(drafter.create_cache(1, 16), taps, at)
        masks = jnp.full((1, c.block_size + c.first_slot - 1), c.mask_token_id)
        block = jnp.concatenate([tokens[:, 6:7], masks], axis=1)
        return read(drafter.backbone(cache, tiny_target.embed(block), jnp.array([6]))[0])

    trained, served = training(packed_batch(first, second)), serving(jnp.array([second]))
    for a, b in zip(trained, served, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
