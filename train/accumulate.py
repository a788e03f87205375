"""A step's batch in micro-batches, one after another: the memory of one, the update of all."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dspark_jax.sharding import ROWS, constrain

Result = tuple[Any, dict[str, jax.Array]]


def accumulated(
    compute: Callable[..., Result], params: Any, batch: tuple, mask: jax.Array, weights: jax.Array, count: int
) -> Result:
    """What `compute(*batch)` returns, up to rounding, from `count` micro-batches of the rows.

    Gradients and metrics are means over what is supervised, so a micro-batch weighs as much as it has of that.

    Args:
      compute: gives the gradient of `params` and the metrics of `train.step.gradients`.
      batch: its arguments, trees of [b, ...]; mask: [b, a, g] supervised labels; weights: w_k [g].
    """
    batch, mask = jax.tree.map(lambda x: _cut(x, count), (batch, mask))
    labels = jnp.sum(mask, axis=(1, 2), dtype=jnp.float32)
    shares = {
        "loss": _share(labels @ weights),
        "accept_rate": _share(labels),
        "tau": _share(labels[:, 0]),
        "confidence_error": _share(jnp.sum(labels, axis=1)),
        "supervised": jnp.ones(count, jnp.int32),
    }

    def add(total, part):
        rows, share = part
        gradient, metrics = compute(*rows)
        total = jax.tree.map(lambda a, b: a + share["loss"] * b, total, gradient)
        return total, {name: share.get(name, share["loss"]) * x for name, x in metrics.items()}

    gradient, metrics = jax.lax.scan(add, optax.tree.zeros_like(params), (batch, shares))
    metrics = {name: jnp.sum(x, axis=0) for name, x in metrics.items()}
    return gradient, metrics | {"gradient_norm": optax.tree.norm(gradient)}


def _share(x: jax.Array) -> jax.Array:
    """Parts [count, ...] of their sum; equal ones of nothing."""
    total = jnp.sum(x, axis=0)
    return jnp.where(total > 0, x / jnp.maximum(total, 1e-6), 1 / len(x))


def _cut(x: jax.Array, count: int) -> jax.Array:
    """[b, ...] to [count, b / count, ...], so that every device keeps its rows."""
    return constrain(x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), None, ROWS, *(None,) * (x.ndim - 1))
