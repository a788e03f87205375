"""The layer drafters are made of, and attention of many small blocks over one context."""

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.models.chunks import in_chunks
from dspark_jax.models.layers import GatedMLP, Projections, RMSNorm


class DraftLayer(nnx.Module):
    """A layer whose keys are the injected context and the block itself (equation 3); who sees whom is its caller's."""

    def __init__(self, config, *, inputs: int | None = None, dtype: jnp.dtype, rngs: nnx.Rngs):
        """`inputs` is the width that attention reads, the hidden size where None."""
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Projections(config, inputs=inputs, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, dtype=dtype, rngs=rngs)

    def finish(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        """Residual stream after attention mix [..., n, h] and MLP."""
        x = x + self.attention.merge(mixed)
        return x + self.mlp(self.mlp_norm(x))


def block_mix(q, k, v, k_block, v_block, seen, chunk: int = 0) -> jax.Array:
    """Attention of many small blocks over one context and themselves, in one softmax.

    Args:
      q: [b, a, w, n, h]; k, v: [b, t, k, h] context; k_block, v_block: [b, a, w, k, h]; seen: [b, a, t] booleans.
      chunk: blocks of a row whose scores exist at once, in the backward pass as well; 0 is all.

    Returns:
      [b, a, w, n, h].
    """
    b, a, w, n, h = q.shape
    if 0 < chunk < a:
        split, join = in_chunks(a, chunk)
        some = jax.checkpoint(lambda q, *own: block_mix(q, k, v, *own), prevent_cse=False)
        return join(jax.lax.map(lambda blocks: some(*blocks), tuple(map(split, (q, k_block, v_block, seen)))))
    kv = k.shape[2]
    q = q.reshape(b, a, w, kv, n // kv, h)
    outer = jnp.einsum("bawkgh,btkh->bkgawt", q, k, preferred_element_type=jnp.float32) * h**-0.5
    inner = jnp.einsum("bawkgh,bazkh->bkgawz", q, k_block, preferred_element_type=jnp.float32) * h**-0.5
    outer = jnp.where(seen[:, None, None, :, None], outer, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(jnp.concatenate([outer, inner], axis=-1), axis=-1).astype(v.dtype)
    outer, inner = weights[..., : k.shape[1]], weights[..., k.shape[1] :]
    mixed = jnp.einsum("bkgawt,btkh->bawkgh", outer, v) + jnp.einsum("bkgawz,bazkh->bawkgh", inner, v_block)
    return mixed.reshape(b, a, w, n, h)
