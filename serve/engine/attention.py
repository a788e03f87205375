"""Attention of a flat stream of tokens over paged keys and values.

The signature is that of JAX's TPU kernel, `jax.experimental.pallas.ops.tpu.ragged_paged_attention`: sequence i owns the
queries cu_q_lens[i] : cu_q_lens[i + 1], which are the last of its kv_lens[i] positions.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dspark_jax.sharding import tensor_shards

Implementation = Literal["kernel", "plain"]

PAGES = P(None, None, "tensor", None)
"""How pages lie on a mesh: split by heads."""

TILE = 8
"""Queries of one sequence that the plain form takes together."""

GROUP = 2
"""Tiles it takes side by side."""

BLOCK = 256
"""Positions it reads at a time."""


def ragged_attention(
    q: jax.Array,
    pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    tile: int = TILE,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Causal attention of every sequence's queries over its own pages.

    Args:
      q: [t, n, h]; those of no sequence give void.
      pages: [pages, page_size, 2 * k, h], keys at even and values at odd places.
      kv_lens: [r]; page_indices: [r, pages a sequence]; cu_q_lens: [r + 1]; num_seqs: [1] sequences there are.
      tile: queries of one sequence that `plain` takes together.
      implementation: `kernel` runs on TPUs, `plain` anywhere; None picks by backend.

    Returns:
      [t, n, h].

    Raises:
      ValueError: unknown implementation.
    """
    if implementation is None:
        implementation = "kernel" if jax.default_backend() == "tpu" else "plain"
    if implementation == "plain":
        return _plain(q, pages, kv_lens, page_indices, cu_q_lens, num_seqs, tile)
    if implementation == "kernel":
        return _kernel(q, pages, kv_lens, page_indices, cu_q_lens, num_seqs)
    raise ValueError(f"implementation must be 'kernel', 'plain' or None, got {implementation!r}.")


def _kernel(q, pages, *markers) -> jax.Array:
    """JAX's kernel; on a mesh every device takes its own heads."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    sizes = {}
    if jax.default_backend() != "tpu":  # compiling for one that is not there: no chip to look tuned sizes up for
        columns, page_size = markers[1].shape[1], pages.shape[1]
        sizes = {"num_kv_pages_per_block": max(min(512 // page_size, columns), 1), "num_queries_per_block": 32}
    attend = partial(ragged_paged_attention, sm_scale=q.shape[-1] ** -0.5, **sizes)
    if tensor_shards() == 1:
        return attend(q, pages, *markers)
    heads, everywhere = P(None, "tensor", None), (P(),) * len(markers)
    # The kernel says nothing of how its result varies over the mesh.
    split = jax.shard_map(attend, in_specs=(heads, PAGES, *everywhere), out_specs=heads, check_vma=False)
    return split(q, pages, *markers)


def _plain(q, pages, kv_lens, page_indices, cu_q_lens, num_seqs, tile: int) -> jax.Array:
    """By tiles of one query where no sequence has more: the others' places would be computed for nothing."""
    r = len(page_indices)
    q_lens = jnp.where(jnp.arange(r) < num_seqs[0], jnp.diff(cu_q_lens), 0)
    inputs = q, pages, kv_lens, page_indices, cu_q_lens, q_lens
    if tile == 1:
        return _tiles(*inputs, 1)
    return jax.lax.cond(jnp.any(q_lens > 1), partial(_tiles, tile=tile), partial(_tiles, tile=1), *inputs)


def _tiles(q, pages, kv_lens, page_indices, cu_q_lens, q_lens, tile: int) -> jax.Array:
    """Tiles of queries in groups, each over blocks of its pages, with the softmax kept as it runs.

    Both loops end where the stream does, so that a step pays for the tokens and contexts that are there.
    """
    (t, n, h), (_, page_size, k2, _), (r, width) = q.shape, pages.shape, page_indices.shape
    k, share = k2 // 2, 2 * n // k2
    group, block = min(GROUP, r), max(min(BLOCK // page_size, width), 1)
    tiles = -(-q_lens // tile)
    ends = jnp.cumsum(tiles)

    def attend(number: jax.Array, out: jax.Array) -> jax.Array:
        i = number * group + jnp.arange(group)
        seq = jnp.minimum(jnp.searchsorted(ends, i, side="right"), r - 1)
        within = ((i - ends[seq] + tiles[seq]) * tile)[:, None] + jnp.arange(tile)
        real = (i < ends[-1])[:, None] & (within < q_lens[seq, None])
        where = jnp.where(real, cu_q_lens[seq, None] + within, t)
        position = (kv_lens - q_lens)[seq, None] + within
        queries = q.at[where].get(mode="fill", fill_value=0).reshape(group, tile, k, share, h)
        queries = queries.transpose(0, 2, 3, 1, 4).reshape(group, k, share * tile, h)
        table, last = page_indices[seq], jnp.max(jnp.where(real, position + 1, 0))

        def read(number: jax.Array, carry):
            highest, total, mixed = carry
            columns = number * block + jnp.arange(block)
            kv = pages[table[:, jnp.minimum(columns, width - 1)]].reshape(group, block * page_size, k, 2, h)
            scores = jnp.einsum("xkqh,xskh->xkqs", queries, kv[..., 0, :], preferred_element_type=jnp.float32)
            seen = number * block * page_size + jnp.arange(block * page_size) <= position[..., None]
            seen = jnp.broadcast_to(seen[:, None], (group, share, tile, block * page_size)).reshape(
                group, 1, share * tile, -1
            )
            scores = jnp.where(seen, scores * h**-0.5, jnp.finfo(jnp.float32).min)
            new = jnp.maximum(highest, jnp.max(scores, axis=-1))
            weights, decay = jnp.exp(scores - new[..., None]), jnp.exp(highest - new)
            add = jnp.einsum("xkqs,xskh->xkqh", weights.astype(kv.dtype), kv[..., 1, :])
            return new, total * decay + jnp.sum(weights, axis=-1), mixed * decay[..., None] + add

        rows = (group, k, share * tile)
        start = jnp.full(rows, jnp.finfo(jnp.float32).min), jnp.zeros(rows), jnp.zeros((*rows, h))
        _, total, mixed = jax.lax.fori_loop(0, -(-last // (block * page_size)), read, start)
        mixed = (mixed / jnp.maximum(total, 1e-30)[..., None]).reshape(group, k, share, tile, h)
        mixed = mixed.transpose(0, 3, 1, 2, 4).reshape(group, tile, n, h)
        return out.at[where].set(mixed.astype(out.dtype), mode="drop")

    return jax.lax.fori_loop(0, -(-ends[-1] // group), attend, jnp.zeros_like(q))
