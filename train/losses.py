"""Losses of equations 11 to 14 and of training-time test, in chunks: [anchors, g, v] logits never exist at once.

The forward pass of a chunk also computes its gradients (they are linear in the loss's cotangent), so that nothing is
recomputed and no logits are kept for the backward pass.
"""

import dataclasses
import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dspark_jax.models.chunks import in_chunks
from dspark_jax.models.decoder import tokens_only
from dspark_jax.models.layers import linear
from dspark_jax.sharding import by_rows, row_shards
from train.distances import distances, fast_distances


@dataclasses.dataclass(frozen=True)
class LossWeights:
    """Weights of the terms and the decay of w_k = exp(-(k - 1) / decay).

    `soft` is of the cross-entropy to the target's whole distribution, which costs nothing where its weight is 0.
    """

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    soft: float = 0.0

    @classmethod
    def training_time_test(cls, step_decay: float = 0.8) -> "LossWeights":
        """Eagle3's loss (arXiv 2503.01840): soft cross-entropy alone, a step weighs `step_decay` of the one before."""
        return cls(ce=0.0, tv=0.0, confidence=0.0, decay=-1 / math.log(step_decay), soft=1.0)

    @property
    def step_decay(self) -> float:
        """w_{k+1} / w_k."""
        return round(math.exp(-1 / self.decay), 9)

    def positions(self, block_size: int) -> jax.Array:
        """w_k [g]."""
        return jnp.exp(-jnp.arange(block_size) / self.decay)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Predictions:
    """What is trained, at n block positions of each of b sequences.

    Attributes:
      hidden: [b, n, d] backbone output; latent: [b, n, r] of the sequential head, or None; w2: [draft_rows, r] or None
        (inside the loop over chunks transposed, one for each device that shares rows, [s, r, draft_rows]).
      confidence: [b, n] logits, or None.
    """

    hidden: jax.Array
    latent: jax.Array | None
    w2: jax.Array | None
    confidence: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Labels:
    """What is frozen.

    Attributes:
      hidden: [b, n, d] target hidden states that predict the same tokens; tokens: [b, n] those tokens.
      shared: instead of `hidden`, (`target_table` [b, t, draft_rows], [b, n] positions in it). Blocks at dense anchors
        overlap, and this computes each position's target distribution once.
      normalizer: [b, n] log of the sum of exponentials of all the target's logits, where it is known beforehand: then
        only the draft rows of its head are computed. None otherwise.
      weight: [b, n] w_k, 0 where nothing is supervised.
      head: [v, d] the target's; draft_head: [draft_rows, d]; draft_ids: [draft_rows] or None.
      num_tokens: rows of the head that are real tokens, the others are never drawn; 0 is all.
    """

    hidden: jax.Array | None
    tokens: jax.Array
    weight: jax.Array
    head: jax.Array
    draft_head: jax.Array
    draft_ids: jax.Array | None
    shared: tuple[jax.Array, jax.Array] | None = None
    normalizer: jax.Array | None = None
    num_tokens: int = dataclasses.field(default=0, metadata={"static": True})

    def real(self, logits: jax.Array, ids: jax.Array | None = None) -> jax.Array:
        """Float32 logits [..., rows] of the head's rows `ids` (None: all), -inf where a row is no real token."""
        rows = self.head.shape[0]
        return tokens_only(logits.astype(jnp.float32), rows, self.num_tokens or rows, ids)


def target_log_probs(labels: Labels, hidden: jax.Array, normalizer: jax.Array | None) -> jax.Array:
    """Log of the target's distribution [..., draft_rows] at hidden states [..., d], over what can be drafted."""
    if labels.draft_ids is None:
        return jax.nn.log_softmax(labels.real(linear(hidden, labels.head)), axis=-1)
    if normalizer is None:
        return jax.nn.log_softmax(labels.real(linear(hidden, labels.head)), axis=-1)[..., labels.draft_ids]
    logits = labels.real(linear(hidden, labels.draft_head), labels.draft_ids)
    return logits - normalizer[..., None]


def target_table(labels: Labels, hidden: jax.Array, normalizer: jax.Array | None, chunk: int) -> jax.Array:
    """`target_log_probs` at all positions [b, t, d], `chunk` positions at a time."""
    split, join = position_chunks(hidden.shape[0], hidden.shape[1], chunk)
    return join(jax.lax.map(lambda rows: target_log_probs(labels, *rows), jax.tree.map(split, (hidden, normalizer))))


def at_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [b, t, ...] at positions [b, n] of each sequence, [b, n, ...]: sequences stay where they are on a mesh."""
    return jax.vmap(lambda sequence, where: sequence[where])(x, index)


def position_chunks(b: int, n: int, chunk: int):
    """`in_chunks` of equal size, of about `chunk` positions a device.

    A chunk holds as many positions of every sequence, so that on a mesh each device has work in all of them.
    """
    columns = max(chunk // max(b // row_shards(), 1), 1)
    return in_chunks(n, -(-n // -(-n // columns)))


def _by_device(x: jax.Array, w2: jax.Array) -> jax.Array:
    """Rows of a batch [b, n, ...] with the device's w2 that they are scored with, [s, rows, ...]."""
    return x.reshape(len(w2), -1, x.shape[-1])


def _logits(predictions: Predictions, labels: Labels) -> jax.Array:
    """Draft logits [b, n, draft_rows] with the sequential head's bias."""
    logits = linear(predictions.hidden, labels.draft_head)
    latent, w2 = predictions.latent, predictions.w2
    if latent is None or w2 is None:
        return logits
    if w2.ndim == 2:
        return logits + linear(latent, w2)
    bias = jnp.einsum("snr,srv->snv", _by_device(latent, w2), w2.astype(latent.dtype))
    return logits + bias.reshape(logits.shape)


def _pull(slope: jax.Array, predictions: Predictions, labels: Labels) -> tuple[jax.Array, Any, Any]:
    """Gradients of hidden states, latents and w2, from that of `_logits`."""
    hidden = slope @ labels.draft_head.astype(slope.dtype)
    latent, w2 = predictions.latent, predictions.w2
    if latent is None or w2 is None:
        return hidden, None, None
    apart = _by_device(slope, w2)
    back = jnp.einsum("snv,srv->snr", apart, w2.astype(slope.dtype)).reshape(latent.shape)
    # In this order: for [draft_rows, r] a CPU would copy the chunk, transposed.
    order = ((1,), (1,)), ((0,), (0,))
    return hidden, back, jax.lax.dot_general(_by_device(latent, w2), apart, order, preferred_element_type=jnp.float32)


def _sums(
    logits: jax.Array, confidence: jax.Array | None, labels: Labels, scale: jax.Array, distances=distances
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Scaled sum of the losses over the positions given, and (ce, l1, confidence, soft sums; accept rate of each).

    There are as many as `scale` has factors: the soft one only where it is asked for.
    """
    if labels.shared is None:
        assert labels.hidden is not None
        log_p = target_log_probs(labels, labels.hidden, labels.normalizer)
    else:
        log_p = at_rows(*labels.shared)
    if labels.draft_ids is None:
        row, known = labels.tokens, labels.tokens < (labels.num_tokens or labels.head.shape[0])
    else:
        row = jnp.minimum(jnp.searchsorted(labels.draft_ids, labels.tokens), len(labels.draft_ids) - 1)
        known = labels.draft_ids[row] == labels.tokens
    ce, l1, cross = distances(labels.real(logits, labels.draft_ids), log_p, row, len(scale) > 3)
    # A token that cannot be drafted has no cross-entropy; its mass still counts in the total variation.
    ce = jnp.where(known, ce, 0.0)
    if labels.draft_ids is not None:
        l1 = l1 + 1 - jnp.sum(jnp.exp(log_p), axis=-1)
    accept = jnp.clip(1 - l1 / 2, 0, 1)
    w = labels.weight
    sums = [jnp.sum(ce * w), jnp.sum(l1 * w), jnp.zeros(())]
    if len(scale) > 3:
        sums.append(jnp.sum(cross * w))
    if confidence is not None:
        label = jax.lax.stop_gradient(accept)
        sums[2] = jnp.sum(w * (jax.nn.softplus(confidence) - label * confidence))
    return sum((a * b for a, b in zip(sums, scale, strict=True)), jnp.zeros(())), (jnp.stack(sums), accept)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def chunked_sums(predictions: Predictions, labels: Labels, scale: jax.Array, chunk: int):
    """Loss over all positions, at most `chunk` of them at a time on a device, in chunks of equal size.

    Args:
      scale: [3] factors of the ce, l1 and confidence sums, or [4] with that of the soft one.

    Returns:
      The scaled sum (differentiable in `predictions`), and (sums like `scale`, accept rate [b, n]), which are not
      differentiated.
    """
    return _chunked(predictions, labels, scale, chunk, gradients=False)[0]


def _chunked(predictions: Predictions, labels: Labels, scale: jax.Array, chunk: int, gradients: bool):
    split, join = position_chunks(labels.tokens.shape[0], labels.tokens.shape[1], chunk)
    table, where = labels.shared or (None, None)
    w2, devices = predictions.w2, row_shards()
    if w2 is not None:
        # Each device adds up the gradient of its own rows, and they are summed once: not in every chunk. That gradient
        # is [r, draft_rows], for the other way around a CPU would need a transposed copy of each chunk.
        apart = jnp.broadcast_to(w2.T, (devices, *w2.T.shape))
        predictions = dataclasses.replace(predictions, w2=by_rows(apart, None, "tensor"))
    per_row = (
        predictions.hidden, predictions.latent, predictions.confidence,
        labels.hidden, labels.normalizer, where, labels.tokens, labels.weight,
    )  # fmt: skip

    def body(carry, rows):
        total, sums, w2_gradient = carry
        hidden, latent, confidence, target_hidden, normalizer, where, tokens, weight = rows
        here = Predictions(hidden, latent, predictions.w2, confidence)
        shared = None if where is None else (table, where)
        truth = dataclasses.replace(
            labels, hidden=target_hidden, normalizer=normalizer, tokens=tokens, weight=weight, shared=shared
        )
        logits = _logits(here, truth)
        if not gradients:
            loss, (terms, accept) = _sums(logits, confidence, truth, scale)
            return (total + loss, sums + terms, None), (accept, None)
        compute = jax.value_and_grad(_sums, (0, 1), has_aux=True)
        (loss, (terms, accept)), (slope, confidence) = compute(logits, confidence, truth, scale, fast_distances)
        hidden, latent, grad = _pull(slope, here, truth)
        w2_gradient = None if grad is None else by_rows(w2_gradient + grad, None, "tensor")
        return (total + loss, sums + terms, w2_gradient), (accept, (hidden, latent, confidence))

    w2_gradient = None
    if gradients and predictions.w2 is not None:
        w2_gradient = jnp.zeros(predictions.w2.shape, jnp.float32)
    zero = (jnp.zeros(()), jnp.zeros(scale.shape), w2_gradient)
    (total, sums, w2_gradient), (accept, rows) = jax.lax.scan(body, zero, jax.tree.map(split, per_row))
    grad = None
    if gradients:
        hidden, latent, confidence = jax.tree.map(join, rows)
        if w2 is not None and w2_gradient is not None:
            w2_gradient = w2_gradient.sum(axis=0).T.astype(w2.dtype)
        grad = Predictions(hidden, latent, w2_gradient, confidence)
    return (total, (sums, join(accept))), grad


def _forward(predictions, labels, scale, chunk):
    return _chunked(predictions, labels, scale, chunk, gradients=True)


def _backward(chunk, grad, cotangents):
    scaled = jax.tree.map(lambda g: (cotangents[0] * g).astype(g.dtype), grad)
    return scaled, None, None


chunked_sums.defvjp(_forward, _backward)


def dspark_loss(
    predictions: Predictions,
    labels: Labels,
    weights: LossWeights,
    chunk: int = 512,
    implementation: Literal["chunked", "dense"] = "chunked",
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """L = ce * L_ce + tv * L_tv + confidence * L_conf (+ soft * L_soft), means weighted with w_k (equation 14).

    Args:
      chunk: positions whose logits exist at once on a device, at most (but one of every sequence).
      implementation: `dense` is the plain twin: all logits at once, differentiated by JAX.

    Returns:
      The loss and {ce, l1, confidence, (soft,) loss, accept: [b, n]}. All zero when nothing is supervised.

    Raises:
      ValueError: unknown implementation.
    """
    if implementation not in ("chunked", "dense"):
        raise ValueError(f"implementation must be 'chunked' or 'dense', got {implementation!r}.")
    denominator = jnp.sum(labels.weight) + 1e-6
    factors = [weights.ce, weights.tv, weights.confidence, *([weights.soft] if weights.soft else [])]
    scale = jnp.array(factors) / denominator
    if predictions.confidence is None:
        scale = scale.at[2].set(0)
    if implementation == "chunked":
        loss, (sums, accept) = chunked_sums(predictions, labels, scale, chunk)  # pyright: ignore[reportGeneralTypeIssues]
    else:
        loss, (sums, accept) = _sums(_logits(predictions, labels), predictions.confidence, labels, scale)
    terms = dict(zip(("ce", "l1", "confidence", "soft"), jax.lax.stop_gradient(sums) / denominator, strict=False))
    return loss, {"loss": loss, **terms, "accept": accept}
