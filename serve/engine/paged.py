"""A cache whose keys and values lie in pages, for streams of tokens and for drafted blocks."""

import dataclasses

import jax
import jax.numpy as jnp

from serve.engine.attention import ragged_attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Markers:
    """Whose tokens a stream holds, and where they lie; see `serve.engine.attention`.

    Attributes:
      where: [t] place of every token in the pool, counted over all pages; padding lies in page 0, which is nobody's.
      kv_lens: [r]; page_indices: [r, pages]; cu_q_lens: [r + 1]; num_seqs: [1].
    """

    where: jax.Array
    kv_lens: jax.Array
    page_indices: jax.Array
    cu_q_lens: jax.Array
    num_seqs: jax.Array

    @classmethod
    def blocks(cls, page_indices: jax.Array, position: jax.Array, width: int, page_size: int) -> "Markers":
        """Of one block of `width` tokens a row, from `position` [r] on."""
        r = position.shape[0]
        places = position[:, None] + jnp.arange(width)
        return cls(
            place(page_indices, places, page_size).ravel(),
            position + width,
            page_indices,
            jnp.arange(r + 1, dtype=jnp.int32),
            jnp.full(1, r, jnp.int32),
        )


def place(page_indices: jax.Array, positions: jax.Array, page_size: int) -> jax.Array:
    """Places [r, w] of positions [r, w] in pages [r, pages]; what lies beyond them, in page 0."""
    pages = jnp.take_along_axis(page_indices, positions // page_size, axis=1, mode="fill", fill_value=0)
    return pages * page_size + positions % page_size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Pages of one model, with the markers of a step; `dspark_jax.models.cache.Cache` and `BlockCache`.

    Attributes:
      pages: one array [pages, page_size, 2 * k, h] a layer, keys at even and values at odd places.
      tile: queries of a sequence that plain attention takes together.
    """

    pages: tuple[jax.Array, ...]
    markers: Markers
    tile: int = dataclasses.field(metadata={"static": True})

    def write(self, layer: int, k: jax.Array, v: jax.Array, positions: jax.Array) -> "PagedCache":
        """Stores k, v [b, t, k, h] of the stream; `positions` are in the markers already."""
        pages = list(self.pages)
        old = pages[layer]
        kv = jnp.stack([k, v], axis=-2).reshape(-1, *old.shape[2:]).astype(old.dtype)
        flat = old.reshape(-1, *old.shape[2:]).at[self.markers.where].set(kv)
        pages[layer] = flat.reshape(old.shape)
        return dataclasses.replace(self, pages=tuple(pages))

    def attend(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, "PagedCache"]:
        """See `Cache.attend`; the stream is one row, b is 1."""
        cache = self.write(layer, k, v, positions)
        return cache._mix(layer, q[0], self.tile)[None], cache

    def attend_block(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, "PagedCache"]:
        """See `BlockCache.attend_block`.

        All queries of a block see the same keys, so they go as heads of one token: what is causal then lets them see
        the whole block.
        """
        cache = self.write(layer, k, v, positions)
        (r, w, n, h), kv = q.shape, k.shape[2]
        heads = q.reshape(r, w, kv, n // kv, h).swapaxes(1, 2).reshape(r, -1, h)
        mixed = cache._mix(layer, heads, 1).reshape(r, kv, w, n // kv, h)
        return mixed.swapaxes(1, 2).reshape(r, w, n, h), cache

    def _mix(self, layer: int, q: jax.Array, tile: int) -> jax.Array:
        m = self.markers
        return ragged_attention(q, self.pages[layer], m.kv_lens, m.page_indices, m.cu_q_lens, m.num_seqs, tile=tile)
