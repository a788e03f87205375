"""The chunked loss against its plain twin, the equations written out, and numbers computed by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.losses import Labels, LossWeights, Predictions, dspark_loss

TOLERANCE = 1e-5
V, D, R = 40, 16, 6


def rows(n, *, b=1, reduced=False, head=True, confidence=True, num_tokens=0, known=False):
    """Random predictions and labels of n block positions of b sequences; a third of them unsupervised."""
    draw = np.random.default_rng(n)
    normal = lambda *shape: jnp.asarray(draw.normal(size=shape), jnp.float32)  # noqa: E731
    ids = jnp.asarray(np.sort(draw.permutation(V)[:23])) if reduced else None
    table = normal(V, D)
    draft_head = table if ids is None else table[ids]
    predictions = Predictions(
        normal(b, n, D),
        normal(b, n, R) if head else None,
        normal(len(draft_head), R) if head else None,
        normal(b, n) if confidence else None,
    )
    tokens = jnp.asarray(draw.integers(num_tokens or V, size=(b, n)))
    weight = jnp.asarray(draw.random((b, n)) * (draw.random((b, n)) > 0.3), jnp.float32).at[0, 0].set(1)
    hidden = normal(b, n, D)
    normalizer = jax.nn.logsumexp((hidden @ table.T)[..., : num_tokens or V], axis=-1) if known else None
    return predictions, Labels(
        hidden, tokens, weight, table, draft_head, ids, normalizer=normalizer, num_tokens=num_tokens
    )


def written_out(predictions, labels, weights):
    """Equations 11 to 14 over the whole vocabulary, where what cannot be drafted has probability 0."""
    real = jnp.arange(V) < (labels.num_tokens or V)
    p = jax.nn.softmax(jnp.where(real, labels.hidden @ labels.head.T, -jnp.inf))
    logits = predictions.hidden @ labels.draft_head.T
    if predictions.latent is not None:
        logits += predictions.latent @ predictions.w2.T
    ids = jnp.arange(V) if labels.draft_ids is None else labels.draft_ids
    full = jnp.full((*logits.shape[:2], V), -jnp.inf).at[..., ids].set(logits)
    q = jax.nn.softmax(jnp.where(real, full, -jnp.inf))
    own = jnp.take_along_axis(q, labels.tokens[..., None], axis=-1)[..., 0]
    ce = jnp.where(own > 0, -jnp.log(jnp.where(own > 0, own, 1)), 0)
    l1 = jnp.abs(p - q).sum(-1)
    drafted = p[..., ids] * jnp.log(jnp.where(q[..., ids] > 0, q[..., ids], 1))
    terms = weights.ce * ce + weights.tv * l1 - weights.soft * drafted.sum(-1)
    if predictions.confidence is not None:
        label, c = jax.lax.stop_gradient(1 - l1 / 2), jax.nn.sigmoid(predictions.confidence)
        terms -= weights.confidence * (label * jnp.log(c) + (1 - label) * jnp.log(1 - c))
    return jnp.sum(labels.weight * terms) / jnp.sum(labels.weight)


KINDS = {
    "full": {},
    "reduced": {"reduced": True},
    "padded": {"num_tokens": 37},
    "reduced, padded": {"reduced": True, "num_tokens": 30},
    "reduced, normalizer known": {"reduced": True, "num_tokens": 30, "known": True},
    "no head": {"head": False},
    "no confidence": {"confidence": False},
}


SIZES = [("full", 1, 1, 8), ("full", 1, 130, 128), ("full", 7, 3, 2), *((kind, 3, 13, 15) for kind in KINDS)]


@pytest.mark.parametrize(("kind", "b", "n", "chunk"), SIZES)
def test_chunked_equals_dense(kind, b, n, chunk):
    predictions, labels = rows(n, b=b, **KINDS[kind])
    weights = LossWeights(0.3, 0.9, 0.7, soft=0.0 if kind == "full" else 0.5)

    @jax.jit
    def compute(predictions):
        losses = (
            lambda p: dspark_loss(p, labels, weights, chunk),
            lambda p: dspark_loss(p, labels, weights, implementation="dense"),
            lambda p: (written_out(p, labels, weights), None),
        )
        return [jax.value_and_grad(loss, has_aux=True)(predictions) for loss in losses]

    (value, gradient), (dense, dense_gradient), (plain, plain_gradient) = compute(predictions)
    for other in (dense, (plain[0], value[1])):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE, rtol=TOLERANCE), value, other)
    for other in (dense_gradient, plain_gradient):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE, rtol=TOLERANCE), gradient, other)


def test_value_alone_is_the_value_of_the_gradient_pass():
    predictions, labels = rows(37)
    alone = dspark_loss(predictions, labels, LossWeights(), 8)[0]
    (value, _), gradient = jax.value_and_grad(lambda p: dspark_loss(p, labels, LossWeights(), 8), has_aux=True)(
        predictions
    )
    np.testing.assert_allclose(alone, value, rtol=1e-6)
    doubled = jax.grad(lambda p: 2 * dspark_loss(p, labels, LossWeights(), 8)[0])(predictions)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(2 * a, b, rtol=1e-6), gradient, doubled)


def test_padding_rows_take_no_mass():
    predictions, labels = rows(12, num_tokens=37)
    gradient = jax.grad(lambda p: dspark_loss(p, labels, LossWeights(), 5)[0])(predictions)
    assert not np.any(gradient.w2[37:]) and np.all(np.any(gradient.w2[:37], axis=1))


@pytest.mark.parametrize("implementation", ["chunked", "dense"])
def test_a_masked_label_that_is_no_token_counts_for_nothing(implementation):
    predictions, labels = rows(12, num_tokens=37)
    tokens, weight = labels.tokens.at[0, 3].set(38), labels.weight.at[0, 3].set(0)
    odd, even = (dataclasses.replace(labels, tokens=t, weight=weight) for t in (tokens, labels.tokens))
    losses = [dspark_loss(predictions, x, LossWeights(), 5, implementation)[0] for x in (odd, even)]
    assert np.isfinite(losses[0]) and losses[0] == losses[1]


def test_one_block_of_four_by_hand():
    # The head is the identity, so hidden states are logits, and logarithms of probabilities are just right.
    p = [[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.5, 0.25, 0.25]]
    q = [[0.25, 0.25, 0.5], [0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]
    tokens = [0, 1, 2, 0]
    confidence = [math.log(3), 0.0, math.log(3), 0.0]
    w = [1, math.exp(-1 / 4), math.exp(-1 / 2), math.exp(-3 / 4)]
    ce = [math.log(4), math.log(4), math.log(4), math.log(3)]
    l1 = [0.5, 0, 0.5, 1 / 3]
    # Labels 3/4, 1, 3/4 and 5/6 against confidences 3/4, 1/2, 3/4 and 1/2.
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    bce = [entropy, math.log(2), entropy, math.log(2)]
    mean = lambda x: sum(a * b for a, b in zip(w, x, strict=True)) / sum(w)  # noqa: E731

    weights = LossWeights()
    log = lambda x: jnp.log(jnp.array(x))  # noqa: E731
    loss, metrics = dspark_loss(
        Predictions(log([q]), None, None, jnp.array([confidence])),
        Labels(log([p]), jnp.array([tokens]), weights.positions(4)[None], jnp.eye(3), jnp.eye(3), None),
        weights,
        chunk=3,
    )
    np.testing.assert_allclose(metrics["ce"], mean(ce), rtol=TOLERANCE)
    np.testing.assert_allclose(metrics["l1"], mean(l1), rtol=TOLERANCE)
    np.testing.assert_allclose(metrics["confidence"], mean(bce), rtol=TOLERANCE)
    np.testing.assert_allclose(metrics["accept"], [[0.75, 1, 0.75, 5 / 6]], rtol=TOLERANCE)
    np.testing.assert_allclose(loss, 0.1 * mean(ce) + 0.9 * mean(l1) + mean(bce), rtol=TOLERANCE)


def test_training_time_test_by_hand():
    # Cross-entropies of three steps to the target's distribution, each step weighing 0.8 of the one before.
    p = [[0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.25, 0.5, 0.25]]
    q = [[0.25, 0.25, 0.5], [0.25, 0.25, 0.5], [0.5, 0.25, 0.25]]
    entropies = [1.75 * math.log(2), 1.5 * math.log(2), 1.75 * math.log(2)]
    weights = LossWeights.training_time_test(step_decay=0.8)
    loss, metrics = dspark_loss(
        Predictions(jnp.log(jnp.array([q])), None, None, None),
        Labels(
            jnp.log(jnp.array([p])), jnp.array([[0, 1, 2]]), weights.positions(3)[None], jnp.eye(3), jnp.eye(3), None
        ),
        weights,
        chunk=2,
    )
    expected = sum(0.8**k * entropy for k, entropy in enumerate(entropies)) / (1 + 0.8 + 0.64)
    np.testing.assert_allclose([loss, metrics["soft"]], [expected] * 2, rtol=TOLERANCE)
    assert weights.step_decay == 0.8 and LossWeights().soft == 0


def test_unknown_implementation():
    with pytest.raises(ValueError, match="chunked"):
        dspark_loss(*rows(3), LossWeights(), implementation="sparse")
