"""How far the drafter's distribution is from the target's, and a gradient of it in few passes over the logits."""

import jax
import jax.numpy as jnp


def distances(logits: jax.Array, log_p: jax.Array, row: jax.Array, soft: bool) -> tuple[jax.Array, ...]:
    """Distances of q = softmax(logits) [..., rows] from p; the plain twin of `fast_distances`.

    Args:
      log_p: [..., rows]; row: [...] of the token drawn; soft: whether the last term is wanted, zeros otherwise.

    Returns:
      -log q(token), sum |q - p| and -sum p log q, all [...].
    """
    normalizer, q, p = _both(logits, log_p)
    return _entropy(logits, normalizer, row), jnp.sum(jnp.abs(q - p), axis=-1), _soft(logits, normalizer, p, soft)


def _both(logits: jax.Array, log_p: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    return normalizer, jnp.exp(logits - normalizer[..., None]), jnp.exp(log_p)


def _entropy(logits: jax.Array, normalizer: jax.Array, row: jax.Array) -> jax.Array:
    return normalizer - jnp.take_along_axis(logits, row[..., None], axis=-1)[..., 0]


def _soft(logits: jax.Array, normalizer: jax.Array, p: jax.Array, wanted: bool) -> jax.Array:
    # What no draft can be has no mass or no logit, and takes no part.
    terms = jnp.where(p > 0, p * (normalizer[..., None] - logits), 0.0)
    return jnp.sum(terms, axis=-1) if wanted else jnp.zeros_like(normalizer)


def _forward(logits, log_p, row, soft):
    normalizer, q, p = _both(logits, log_p)
    # Two sums in one pass: s = sign(q - p) times q - p, and times q.
    pair = jnp.abs(q - p), jnp.where(q > p, q, -q)
    l1, tilt = jax.lax.reduce(pair, (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] + b[1]), (q.ndim - 1,))
    found = _entropy(logits, normalizer, row), l1, _soft(logits, normalizer, p, soft)
    return found, (logits, normalizer, log_p, row, tilt)


def _backward(soft, residuals, cotangents):
    logits, normalizer, log_p, row, tilt = residuals
    ce, l1, cross = (x[..., None] for x in cotangents)
    q, p = jnp.exp(logits - normalizer[..., None]), jnp.exp(log_p)
    drawn = jnp.arange(q.shape[-1]) == row[..., None]
    # The gradient of sum |q - p| is q (s - <s, q>).
    gradient = q * (ce - l1 * tilt[..., None] + jnp.where(q > p, l1, -l1)) - jnp.where(drawn, ce, 0.0)
    if soft:
        gradient += cross * (q * jnp.sum(p, axis=-1, keepdims=True) - p)
    return gradient, None, None


fast_distances = jax.custom_vjp(distances, nondiff_argnums=(3,))
fast_distances.defvjp(_forward, _backward)
