"""The target's attention in training, over packed documents."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from dspark_jax.models.cache import mix
from dspark_jax.models.chunks import in_chunks
from dspark_jax.models.splash import Visible, splash_attention
from dspark_jax.sharding import by_rows_and_heads

Attention = Literal["plain", "splash", "cudnn"]


@dataclasses.dataclass(frozen=True)
class PackedAttention:
    """The cache of a training pass: stores nothing, attends causally inside each document.

    Attributes:
      segments: [b, t] document of every token; chunk: queries of a row whose plain scores exist at once, a divisor of
        t, or 0 for all; implementation: see `train.attention`.
    """

    segments: jax.Array
    chunk: int = 0
    implementation: Attention = "plain"

    def attend(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array):
        run = {"plain": self._plain, "splash": self._splash, "cudnn": by_rows_and_heads(_cudnn)}[self.implementation]
        return run(q, k, v, self.segments), self

    def _splash(self, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        ends = jnp.broadcast_to(1 + jnp.arange(q.shape[1]), segments.shape)
        return splash_attention(q, k, v, Visible(ends, jnp.zeros_like(ends), segments, segments))

    def _plain(self, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        b, t = segments.shape
        keys, values, column = k.swapaxes(1, 2), v.swapaxes(1, 2), jnp.arange(t)

        def some(queries) -> jax.Array:
            q, mine, row = queries
            causal = row[..., None] >= column
            return mix(q, keys, values, causal & (mine[..., None] == segments[:, None]))

        queries = q, segments, jnp.broadcast_to(column, (b, t))
        if not self.chunk:
            return some(queries)
        split, join = in_chunks(t, self.chunk)
        return join(jax.lax.map(some, jax.tree.map(split, queries)))


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    same = (segments[:, :, None] == segments[:, None])[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True, implementation="cudnn")
