"""The blocks targets and drafters are made of. Weights keep the [out, in] layout of checkpoints."""

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.sharding import tensor_shards

FEW_ROWS = 32

FEW_TOKENS = 512
"""Up to so many, the product with a whole matrix is cheaper than moving a part of it between devices."""


def linear(x: jax.Array, w: jax.Array, bias: jax.Array | None = None, implementation: str | None = None) -> jax.Array:
    """x [..., i] @ w [o, i]^T (+ bias [o]) -> [..., o].

    Args:
      implementation: `rows` is the plain product; `features` computes (w x^T)^T, which XLA:CPU runs up to 2x faster for
        2..32 rows (it streams the weights once instead of once a row). None picks `features` there, else `rows`.

    Raises:
      ValueError: unknown implementation.
    """
    rows = x.size // x.shape[-1]
    if implementation is None:
        implementation = "features" if 1 < rows <= FEW_ROWS and jax.default_backend() == "cpu" else "rows"
    if implementation == "features":
        # The barriers keep XLA from folding the transposes back into the slow form; Eigen's kernels take four columns.
        flat = jnp.pad(x.reshape(rows, -1), ((0, -rows % 4 if rows > 2 else 0), (0, 0)))
        columns = jax.lax.optimization_barrier(flat.T)
        y = jax.lax.optimization_barrier(w.astype(x.dtype) @ columns).T[:rows].reshape(*x.shape[:-1], -1)
    elif implementation == "rows":
        y = x @ w.astype(x.dtype).T
    else:
        raise ValueError(f"implementation must be 'rows', 'features' or None, got {implementation!r}.")
    return y if bias is None else y + bias.astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm in float32 with a learned scale."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide.astype(x.dtype) * self.scale[...].astype(x.dtype)).astype(x.dtype)


class Linear(nnx.Module):
    """Affine map with weight [out, in]."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (outputs, inputs), dtype) * inputs**-0.5)
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return linear(x, self.weight[...], None if self.bias is None else self.bias[...])


class GatedMLP(nnx.Module):
    """down(silu(gate x) * up x), with gate and up in one matrix [2 f, d]."""

    def __init__(self, hidden: int, inner: int, *, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate_up = Linear(hidden, 2 * inner, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(inner, hidden, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Projections(nnx.Module):
    """Query, key, value and output projections of one attention layer, q/k/v in one matrix [(n + 2 k) h, inputs].

    `inputs` is the width they read, the model's own where None.
    """

    def __init__(self, config, *, inputs: int | None = None, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = Linear(inputs or config.hidden_size, width, bias=config.attention_bias, dtype=dtype, rngs=rngs)
        self.out = Linear(
            self.heads * self.head_dim, config.hidden_size, bias=config.output_bias, dtype=dtype, rngs=rngs
        )
        norm = config.qk_norm
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype) if norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype) if norm else None

    def split(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Normalised q [..., n, h], k and v [..., k, h] of x [..., inputs], before rotation."""
        n, k, h = self.heads, self.kv_heads, self.head_dim
        joint = self.qkv(x).reshape(*x.shape[:-1], n + 2 * k, h)
        q, k_, v = jnp.split(joint, [n, n + k], axis=-2)
        return self._norm(q, self.q_norm), self._norm(k_, self.k_norm), v

    def context(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Normalised k and v [..., k, h] of x [..., inputs]: what injected context needs, without the queries."""
        start = self.heads * self.head_dim
        if tensor_shards() > 1 and x.size // x.shape[-1] <= FEW_TOKENS:
            joint = self.qkv(x)[..., start:]
        else:
            bias = None if self.qkv.bias is None else self.qkv.bias[start:]
            joint = linear(x, self.qkv.weight[start:], bias)
        k, v = jnp.split(joint.reshape(*x.shape[:-1], 2 * self.kv_heads, self.head_dim), 2, axis=-2)
        return self._norm(k, self.k_norm), v

    def merge(self, mixed: jax.Array) -> jax.Array:
        """Output projection of the mix [..., n, h] -> [..., d]."""
        return self.out(mixed.reshape(*mixed.shape[:-2], -1))

    @staticmethod
    def _norm(x: jax.Array, norm: RMSNorm | None) -> jax.Array:
        return x if norm is None else norm(x)
