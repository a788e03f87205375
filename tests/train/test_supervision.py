"""Rows with little or nothing to learn, and documents packed together."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from train.anchors import sample_anchors
from train.data import Document, Piece, pack
from train.loop import optimizer
from train.losses import LossWeights
from train.step import StepConfig, TokenBatch, TrainState, drafter_loss, target_features, train_step

DRAW = np.random.default_rng(0)
LONG, OTHER, SHORT, ONE, PROMPT, LAST = (
    Document(DRAW.integers(37, size=length).astype(np.int32), np.arange(length) >= answer)
    for length, answer in ((17, 5), (13, 0), (3, 1), (1, 0), (12, 12), (32, 31))
)


@pytest.fixture(scope="module")
def compute(tiny_target, make_drafter):
    """compute(rows of documents, seq_len): loss, metrics and gradients with every candidate an anchor.

    Rows are few shapes on purpose: each is a program.
    """
    drafter = make_drafter(tiny_target, draft_vocab_size=30)
    graph, params, rest = nnx.split(drafter, nnx.Param, ...)

    @partial(jax.jit, static_argnums=2)
    def run(params, batch: TokenBatch, share: bool):
        anchors, keep = sample_anchors(jax.random.key(0), batch.supervised, batch.segments, batch.tokens.shape[1])
        features = target_features(tiny_target, batch, drafter.config.tap_ids)

        def loss(params):
            model = nnx.merge(graph, params, rest)
            return drafter_loss(model, tiny_target, batch, *features, anchors, keep, LossWeights(), 20, share)

        return jax.value_and_grad(loss, has_aux=True)(params)

    def compute(rows, seq_len, share=False):
        (loss, metrics), gradient = run(params, batch_of(rows, seq_len), share)
        return loss, metrics, gradient

    return compute


def batch_of(rows, seq_len) -> TokenBatch:
    documents = [document for row in rows for document in row]
    pieces, at = [], 0
    for row in rows:
        pieces.append([Piece(at + i, 0, len(document[0])) for i, document in enumerate(row)])
        at += len(row)
    return jax.tree.map(jnp.asarray, pack(documents, pieces, seq_len))


@pytest.mark.parametrize(
    ("rows", "seq_len"),
    [([[PROMPT]], 32), ([[], []], 32), ([[ONE]], 1), ([[ONE]], 32), ([[LAST]], 32), ([[LAST], [PROMPT]], 32)],
    ids=["prompt only", "padding only", "length 1", "one token, padded", "last token only", "two such rows"],
)
def test_nothing_to_learn(compute, rows, seq_len):
    loss, metrics, gradient = compute(rows, seq_len)
    assert loss == 0 and metrics["supervised"] == 0 and metrics["tau"] == 1
    assert all(np.isfinite(m).all() for m in jax.tree.leaves(metrics))
    assert all(not np.any(g) for g in jax.tree.leaves(gradient))


def test_a_row_without_supervision_changes_nothing(compute):
    alone, _, gradient = compute([[LONG]], 32)
    both, metrics, other = compute([[LONG], [PROMPT]], 32)
    np.testing.assert_allclose(both, alone, rtol=1e-5)
    assert metrics["supervised"] > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient, other)


def test_a_sequence_shorter_than_a_block(compute):
    loss, metrics, gradient = compute([[SHORT]], 3)
    assert np.isfinite(loss) and loss > 0
    # Its only anchor is token 1, its only label token 2.
    assert metrics["supervised"] == 1 and metrics["accept_rate"][1:].tolist() == [0, 0, 0]
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_packed_documents_give_the_loss_of_each_apart(compute):
    packed = compute([[LONG, OTHER]], 32)
    apart = compute([[LONG], [OTHER]], 32)
    assert packed[1]["supervised"] == apart[1]["supervised"] > 60
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), packed, apart)


def test_shared_target_distributions_give_the_same_loss(compute):
    plain, shared = (compute([[LONG], [OTHER, SHORT]], 32, share) for share in (False, True))
    assert plain[1]["supervised"] > 60
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain, shared)


def test_a_step_draws_its_own_anchors_and_counts_without_supervision(tiny_target, make_drafter, tiny_run):
    graph, params, rest = nnx.split(make_drafter(tiny_target), nnx.Param, ...)
    target_graph, target_params = nnx.split(tiny_target)
    tx = optimizer(tiny_run)
    config = StepConfig(graph, target_graph, tx, LossWeights(), (-1, 0), 3, 32, share_targets=False, seed=0)
    step = jax.jit(partial(train_step, config))

    def run(rows, number):
        return step(TrainState(jnp.int32(number), params, tx.init(params)), rest, target_params, batch_of(rows, 32))

    losses = [run([[LONG]], number)[1]["loss"] for number in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    after, metrics = run([[PROMPT]], 5)
    assert after.step == 6 and metrics["loss"] == 0 and metrics["gradient_norm"] == 0
    jax.tree.map(np.testing.assert_array_equal, after.params, params)
