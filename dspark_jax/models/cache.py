"""Key/value caches. A cache owns attention: a layer hands it (layer, q, k, v) and gets the mix back."""

import dataclasses
from typing import Protocol, Self

import jax
import jax.numpy as jnp


class Cache(Protocol):
    """What the decoder needs of a cache; dense here, paged in the server."""

    def attend(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, Self]:
        """Stores k, v [b, t, k, h] at `positions` [b, t] and returns the mix [b, t, n, h] and the new cache."""
        ...


class BlockCache(Protocol):
    """What a drafter that drafts whole blocks needs of a cache."""

    def write(self, layer: int, k: jax.Array, v: jax.Array, positions: jax.Array) -> Self:
        """Stores k, v [b, t, k, h] at `positions` [b, t]."""
        ...

    def attend_block(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, Self]:
        """`Cache.attend` of one block a row, whose queries all see the context before it and the whole block."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseCache:
    """One row of slots per sequence; the token at position i lives in slot i.

    A query at position p sees slots 0..p. Slots past p may hold keys of rejected drafts: they are masked by position,
    and rewritten before any query can see them. Writes outside the cache are dropped, never clamped.

    Attributes:
      keys, values: one array [b, k, s, h] a layer. One stacked array would be copied whole at every layer's update.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @classmethod
    def create(
        cls, layers: int, batch: int, slots: int, kv_heads: int, head_dim: int, dtype: jnp.dtype
    ) -> "DenseCache":
        """An empty cache of `slots` positions a row."""
        shape = (batch, kv_heads, slots, head_dim)
        return cls(*(tuple(jnp.zeros(shape, dtype) for _ in range(layers)) for _ in "kv"))

    def write(self, layer: int, k: jax.Array, v: jax.Array, positions: jax.Array) -> "DenseCache":
        """Stores k, v [b, t, k, h] at `positions` [b, t]; positions outside the cache are dropped."""
        keys, values = list(self.keys), list(self.values)
        keys[layer] = _scatter(keys[layer], k, positions)
        values[layer] = _scatter(values[layer], v, positions)
        return DenseCache(tuple(keys), tuple(values))

    def attend(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, "DenseCache"]:
        """See `Cache.attend`."""
        cache = self.write(layer, k, v, positions)
        visible = jnp.arange(cache.keys[layer].shape[2]) <= positions[..., None]
        return mix(q, cache.keys[layer], cache.values[layer], visible), cache

    def attend_block(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, "DenseCache"]:
        """See `BlockCache.attend_block`."""
        cache = self.write(layer, k, v, positions)
        visible = jnp.arange(cache.keys[layer].shape[2]) <= positions[:, -1:]
        visible = jnp.broadcast_to(visible[:, None], (*positions.shape, visible.shape[1]))
        return mix(q, cache.keys[layer], cache.values[layer], visible), cache


def _scatter(slots: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    rows = jnp.arange(slots.shape[0])[:, None]
    outside = jnp.where(positions < 0, slots.shape[2], positions)
    return slots.at[rows, :, outside].set(new.astype(slots.dtype), mode="drop", unique_indices=True)


def mix(q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array) -> jax.Array:
    """Grouped-query attention over head-major keys.

    Args:
      q: [b, t, n, h]; keys, values: [b, k, s, h]; visible: [b, t, s] booleans.

    Returns:
      [b, t, n, h] in the dtype of q; scores and softmax are float32.
    """
    b, t, n, h = q.shape
    k = keys.shape[1]
    grouped = q.reshape(b, t, k, n // k, h).transpose(0, 2, 3, 1, 4).reshape(b, k, n // k * t, h)
    scores = jnp.einsum("bkqh,bksh->bkqs", grouped, keys, preferred_element_type=jnp.float32) * h**-0.5
    scores = scores.reshape(b, k, n // k, t, -1)
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype).reshape(b, k, n // k * t, -1)
    mixed = jnp.einsum("bkqs,bksh->bkqh", weights, values)
    return mixed.reshape(b, k, n // k, t, h).transpose(0, 3, 1, 2, 4).reshape(b, t, n, h).astype(q.dtype)
