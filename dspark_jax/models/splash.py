"""Packed documents through splash attention, JAX's flash attention for TPU, which holds no row's scores in memory."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.sharding import by_rows_and_heads

BLOCK, LANES = 512, 128
"""Queries and keys of a tile, at most; and what their number must be a multiple of."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visible:
    """Which keys a query sees: those of its own document that lie before an end, or in its own range.

    Attributes:
      ends, own: [b, q] indices of keys; with own ranges, `MAX_ENDS` and `MAX_KEYS` bound them. Every query must see a
        key.
      queries, keys: [b, q] and [b, s] documents; width: of own ranges, which start at `own`; 0 is none.
    """

    ends: jax.Array
    own: jax.Array
    queries: jax.Array
    keys: jax.Array
    width: int = dataclasses.field(default=0, metadata={"static": True})


MAX_ENDS, MAX_KEYS = 1 << 15, 1 << 16


@dataclasses.dataclass(frozen=True)
class _Sees:
    """Whether queries see keys, by index; the kernel knows one number of a query, so both of ours are in it."""

    width: int

    def code(self, visible: Visible) -> jax.Array:
        return (visible.ends << 16) | visible.own if self.width else visible.ends

    def __call__(self, code: jax.Array, key: jax.Array) -> jax.Array:
        if not self.width:
            return key < code
        own = code & (MAX_KEYS - 1)
        return (key < code >> 16) | ((key >= own) & (key < own + self.width))


def splash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible, *, interpret: bool = False
) -> jax.Array:
    """Grouped-query attention on TPU, with gradients for q, k and v; tiles without a visible pair are skipped.

    Args:
      q: [b, q, n, h]; k, v: [b, s, k, h]; on a mesh, rows and heads lie over its axes, and `tensor` must divide k.
      interpret: run the kernels step by step, on any device.

    Returns:
      [b, q, n, h].
    """
    return by_rows_and_heads(partial(_rows, interpret=interpret))(q, k, v, visible)


def _rows(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible, *, interpret: bool) -> jax.Array:
    (bq, more_q), (bk, more_k) = _tiling(q.shape[1]), _tiling(k.shape[1])
    heads = lambda x, more: jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))).swapaxes(1, 2)  # noqa: E731
    # What is added to queries sees what the last one sees; what is added to keys lies behind all that can be seen.
    added = dataclasses.replace(visible, ends=more_q, own=more_q, queries=more_q, keys=more_k)
    visible = jax.tree.map(lambda x, more: jnp.pad(x, ((0, 0), (0, more)), mode="edge"), visible, added)
    row = jax.vmap(partial(_row, tile=(bq, bk), interpret=interpret))
    mixed = row(heads(q * q.shape[-1] ** -0.5, more_q), heads(k, more_k), heads(v, more_k), visible)
    return mixed.swapaxes(1, 2)[:, : q.shape[1]]


def _tiling(n: int) -> tuple[int, int]:
    """The size of a tile, and how much n lacks of a multiple of it."""
    size = min(BLOCK, n + -n % LANES)
    return size, -n % size


def _row(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible, tile: tuple[int, int], interpret: bool) -> Any:
    """One row, head-major."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    (bq, bk), sees = tile, _Sees(visible.width)
    runs = _tiles(visible, bq, bk)
    code: Any = sees.code(visible)  # The library would have NumPy's.
    # The library makes this of masks known when a program is traced, or of whole ones in memory. Ours is neither.
    info = lambda after: MaskInfo(after[None], None, runs[None].astype(jnp.int32), None, code)  # noqa: E731
    rows, columns = info(_next(runs)), info(_next(runs.T).T)
    sizes = splash.BlockSizes(bq, bk, bk, bq, bk, bk, bq, bk)
    attend = kernel.SplashAttentionKernel(
        rows, rows, columns, block_sizes=sizes, is_mqa=False, save_residuals=False,
        mask_value=kernel.DEFAULT_MASK_VALUE, attn_logits_soft_cap=None, residual_checkpoint_name=None,
        mask_function=sees, interpret=interpret,
    )  # fmt: skip
    return attend(q, k, v, splash.SegmentIds(visible.queries, visible.keys))


def _tiles(visible: Visible, bq: int, bk: int) -> Any:
    """Which tiles of a row's queries and keys may hold a pair that is seen: [q / bq, s / bk] booleans."""
    ends, own, queries = (x.reshape(-1, bq) for x in (visible.ends, visible.own, visible.queries))
    keys, first = visible.keys.reshape(-1, bk), np.arange(0, len(visible.keys), bk)
    least, most = (lambda x: x.min(1, keepdims=True)), (lambda x: x.max(1, keepdims=True))
    before = first < most(ends)
    within = (first < most(own) + visible.width) & (first + bk > least(own))
    documents = (most(queries) >= least(keys).T) & (least(queries) <= most(keys).T)
    return (before | within) & documents


def _next(runs: jax.Array) -> jax.Array:
    """For every tile, the column of the one that runs next, which is fetched meanwhile; of one that runs, its own."""
    count = runs.size
    at = jnp.where(runs.ravel(), jnp.arange(count), count - 1)
    return (jax.lax.cummin(at, reverse=True) % runs.shape[1]).reshape(runs.shape)


def tiles_at_most(queries: int, keys: int, context: int) -> tuple[int, int, int]:
    """Tiles that run for a row, at most, and their size in queries and in keys.

    The row is one document: of the queries themselves where there are as many as keys, else of blocks that start at its
    end, whose own keys stand behind the `context`.
    """
    (bq, more_q), (bk, more_k) = _tiling(queries), _tiling(keys)
    at: Any = np.minimum(np.arange(queries + more_q), queries - 1)
    ends, own, width = at + 1, at, 0
    if queries != keys:
        each = -(-(keys - context) // queries)
        ends, own, width = np.full_like(at, context), context + at * (keys - context) // queries, each
    one: Any = np.zeros(keys + more_k, int)
    return int(_tiles(Visible(ends, own, np.zeros_like(at), one, width), bq, bk).sum()), bq, bk
