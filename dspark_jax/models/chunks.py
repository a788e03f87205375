"""Arrays cut into chunks that a loop takes one at a time."""

import jax
import jax.numpy as jnp


def in_chunks(n: int, size: int):
    """Cutting [b, n, ...] along n into [chunks, b, size, ...], the last padded with zeros; and joining the results."""

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, -n % size), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :n]

    return split, join
