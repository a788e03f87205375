"""Labels, logits, losses and gradients against the PyTorch reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.checkpoints.drafter import drafter_layout
from dspark_jax.checkpoints.layout import unfold
from dspark_jax.models.layers import linear
from train.anchors import block_labels, candidates
from train.losses import LossWeights
from train.step import TokenBatch, drafter_loss, target_features

NAMES = ("qwen3_dspark_markov", "qwen3_dspark_rnn", "qwen3_dflash_anchor")
TOLERANCE = 1e-4


@pytest.fixture(params=NAMES)
def case(request, golden):
    """The golden models and numbers, and its batch as training reads it."""
    g = golden(request.param)
    tokens = jnp.asarray(g.expected["train.input_ids"])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    supervised = jnp.asarray(g.expected["train.loss_mask"]) > 0
    batch = TokenBatch(tokens, supervised, positions, jnp.zeros_like(tokens))
    anchors = jnp.asarray(g.expected["train.anchor_positions"])
    keep = jnp.asarray(g.expected["train.anchor_keep"], bool)
    return g, batch, anchors, keep


def test_anchors_are_candidates(case):
    _, batch, anchors, keep = case
    allowed = jnp.take_along_axis(candidates(batch.supervised, batch.segments), anchors, axis=1)
    assert jnp.all(allowed | ~keep) and jnp.any(keep)


def test_features(case):
    g, batch, *_ = case
    tap_ids = g.drafter.config.tap_ids
    hidden, taps = jax.jit(lambda batch: target_features(g.target, batch, tap_ids))(batch)
    np.testing.assert_allclose(hidden, g.expected["target.last_hidden"], atol=TOLERANCE)
    np.testing.assert_allclose(taps, g.expected["target.context_features"], atol=TOLERANCE)


def test_labels(case):
    g, batch, anchors, keep = case
    size = g.drafter.config.block_size
    _, labels, mask = block_labels(batch.tokens, batch.supervised, batch.segments, anchors, keep, size)
    np.testing.assert_array_equal(mask, g.expected["train.eval_mask"].astype(bool))
    np.testing.assert_array_equal(labels[mask], g.expected["train.target_ids"][mask])


def test_logits(case):
    g, batch, anchors, keep = case
    drafter, target, segments = g.drafter, g.target, batch.segments
    index, labels, mask = block_labels(
        batch.tokens, batch.supervised, segments, anchors, keep, drafter.config.block_size
    )
    first = jnp.take_along_axis(batch.tokens, anchors, axis=1)[..., None]
    previous = jnp.concatenate([first, labels[..., :-1]], axis=-1)

    @jax.jit
    def compute(batch):
        hidden, taps = target_features(target, batch, drafter.config.tap_ids)
        out = drafter.blocks(target, batch.tokens, taps, anchors, batch.positions, segments)
        logits = drafter.base_logits(target, drafter.draft_head(target), out)
        if drafter.markov:
            logits = logits + linear(drafter.latents(previous, out), drafter.markov.w2[...])
        aligned = target.logits(hidden[jnp.arange(2)[:, None, None], index - 1])
        return logits, aligned, drafter.confidence_logits(previous, out)

    for name, ours in zip(("draft_logits", "aligned_target_logits", "confidence_logits"), compute(batch), strict=True):
        assert (ours is None) == (f"train.{name}" not in g.expected)
        if ours is not None:
            np.testing.assert_allclose(ours[mask], g.expected[f"train.{name}"][mask], atol=TOLERANCE, err_msg=name)


def test_loss_and_every_gradient(case):
    g, batch, anchors, keep = case
    graph, params, rest = nnx.split(g.drafter, nnx.Param, ...)

    def loss(params):
        drafter = nnx.merge(graph, params, rest)
        features = target_features(g.target, batch, drafter.config.tap_ids)
        return drafter_loss(drafter, g.target, batch, *features, anchors, keep, LossWeights(), chunk=7)

    (value, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    for name, ours in {"loss": value, "ce_loss": metrics["ce"], "l1_loss": metrics["l1"]}.items():
        np.testing.assert_allclose(ours, g.expected[f"train.{name}"][0], atol=TOLERANCE, err_msg=name)
    np.testing.assert_allclose(metrics["confidence"], g.expected["train.confidence_loss"][0], atol=TOLERANCE)
    gradients = unfold(nnx.merge(graph, gradient, rest), drafter_layout(g.drafter.config))
    expected = {k.removeprefix("train.grad."): v for k, v in g.expected.items() if k.startswith("train.grad.")}
    assert gradients.keys() == expected.keys()
    for name, ours in gradients.items():
        # Relative to the parameter's own largest gradient: many are far smaller than the tolerance.
        size = np.abs(expected[name]).max()
        np.testing.assert_allclose(ours / size, expected[name] / size, atol=TOLERANCE, err_msg=name)
