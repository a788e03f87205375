"""Anchors: where blocks start in a training sequence."""

import jax
import jax.numpy as jnp


def candidates(supervised: jax.Array, segments: jax.Array) -> jax.Array:
    """[b, t] booleans: tokens that can be anchors, because they and their successor in the document are supervised."""
    follows = supervised[:, 1:] & (segments[:, 1:] == segments[:, :-1])
    return jnp.pad(supervised[:, :-1] & follows, ((0, 0), (0, 1)))


def sample_anchors(
    key: jax.Array, supervised: jax.Array, segments: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Draws up to `count` distinct anchors a sequence, uniformly among its candidates.

    Args:
      supervised: [b, t] booleans; segments: [b, t] document numbers.

    Returns:
      Indices [b, count], ascending, and keep [b, count]; what is missing is index 0, not kept.
    """
    valid = candidates(supervised, segments)
    t = valid.shape[1]
    if t < count:
        valid = jnp.pad(valid, ((0, 0), (0, count - t)))
    scores = jnp.where(valid, jax.random.uniform(key, valid.shape), -1.0)
    top, index = jax.lax.top_k(scores, count)
    keep = top >= 0
    index = jnp.sort(jnp.where(keep, index, t), axis=1)
    keep = index < t
    return jnp.where(keep, index, 0), keep


def block_labels(
    tokens: jax.Array, supervised: jax.Array, segments: jax.Array, anchors: jax.Array, keep: jax.Array, block_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What each block has to predict.

    Returns:
      Label indices into the sequence [b, a, g] (safe to gather with), label tokens [b, a, g], and the mask [b, a, g] of
      supervised labels: a contiguous run from the anchor, inside its document.
    """
    t = tokens.shape[1]
    index = anchors[..., None] + jnp.arange(1, block_size + 1)
    safe = jnp.minimum(index, t - 1)
    flat = safe.reshape(safe.shape[0], -1)
    gather = lambda x: jnp.take_along_axis(x, flat, axis=1).reshape(safe.shape)  # noqa: E731
    own = gather(segments) == jnp.take_along_axis(segments, anchors, axis=1)[..., None]
    good = (index < t) & gather(supervised) & own & keep[..., None]
    return safe, gather(tokens), jnp.cumprod(good, axis=-1).astype(bool)
