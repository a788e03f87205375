"""The layer drafters are made of, and attention of many small blocks over one context."""

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.models.chunks import in_chunks
from dspark_jax.models.layers import GatedMLP, Projections, RMSNorm
from dspark_jax.models.splash import Visible, splash_attention


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


def block_mix(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    k_block: jax.Array,
    v_block: jax.Array,
    ends: jax.Array,
    documents: jax.Array,
    chunk: int = 0,
    attention: str = "plain",
) -> jax.Array:
    """Attention of many small blocks over one context and themselves, in one softmax.

    Args:
      q: [b, a, w, n, h]; k, v: [b, t, k, h] context; segments: [b, t] its documents.
      k_block, v_block: [b, a, z, k, h]; documents: [b, a] of the blocks; ends: [b, a], before which a block sees the
        context of its document.
      chunk: blocks of a row whose scores exist at once, in the backward pass as well; 0 is all.
      attention: `plain`, or `splash` for TPU, where no scores exist.

    Returns:
      [b, a, w, n, h].
    """
    b, a, w, n, h = q.shape
    t, kv = k.shape[1:3]
    if attention == "splash":
        z = k_block.shape[2]
        each = lambda x, times: jnp.repeat(x, times, axis=1)  # noqa: E731
        behind = lambda x, own: jnp.concatenate([x, own.reshape(b, -1, kv, h)], axis=1)  # noqa: E731
        own = jnp.broadcast_to(t + z * jnp.arange(a), (b, a))
        keys = jnp.concatenate([segments, each(documents, z)], axis=1)
        visible = Visible(each(jnp.maximum(ends, 0), w), each(own, w), each(documents, w), keys, z)
        mixed = splash_attention(q.reshape(b, -1, n, h), behind(k, k_block), behind(v, v_block), visible)
        return mixed.reshape(q.shape)
    if 0 < chunk < a:
        split, join = in_chunks(a, chunk)
        some = jax.checkpoint(lambda q, *own: block_mix(q, k, v, segments, *own), prevent_cse=False)
        blocks = q, k_block, v_block, ends, documents
        return join(jax.lax.map(lambda chunk: some(*chunk), tuple(map(split, blocks))))
    q = q.reshape(b, a, w, kv, n // kv, h)
    outer = jnp.einsum("bawkgh,btkh->bkgawt", q, k, preferred_element_type=jnp.float32) * h**-0.5
    inner = jnp.einsum("bawkgh,bazkh->bkgawz", q, k_block, preferred_element_type=jnp.float32) * h**-0.5
    seen = (jnp.arange(t) < ends[..., None]) & (segments[:, None] == documents[..., None])
    outer = jnp.where(seen[:, None, None, :, None], outer, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(jnp.concatenate([outer, inner], axis=-1), axis=-1).astype(v.dtype)
    outer, inner = weights[..., :t], weights[..., t:]
    mixed = jnp.einsum("bkgawt,btkh->bawkgh", outer, v) + jnp.einsum("bkgawz,bazkh->bawkgh", inner, v_block)
    return mixed.reshape(b, a, w, n, h)
