"""The target: one decoder family for Llama and Qwen3."""

from collections.abc import Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.models.cache import Cache, DenseCache
from dspark_jax.models.config import TargetConfig
from dspark_jax.models.layers import GatedMLP, Linear, Projections, RMSNorm, linear
from dspark_jax.models.rope import rotate, rotation


class DecoderLayer(nnx.Module):
    """Pre-norm attention and gated MLP."""

    def __init__(self, config: TargetConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Projections(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, dtype=dtype, rngs=rngs)

    def __call__(self, x, layer: int, positions, cos, sin, cache: Cache) -> tuple[jax.Array, Cache]:
        q, k, v = self.attention.split(self.attention_norm(x))
        mixed, cache = cache.attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v, positions)
        x = x + self.attention.merge(mixed)
        return x + self.mlp(self.mlp_norm(x)), cache


class Decoder(nnx.Module):
    """Llama or Qwen3 with tapped hidden states.

    Tap id `i` is the output of layer `i`, `-1` the embedding output; the last layer's is refused, see `check_taps`.
    """

    def __init__(self, config: TargetConfig, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        table = jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), dtype) * 0.02
        self.embedding = nnx.Param(table)
        self.layers = nnx.List([DecoderLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        tied = config.tie_embeddings
        self.head = None if tied else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, rngs=rngs)

    @property
    def dtype(self) -> jnp.dtype:
        return self.embedding.dtype

    @property
    def head_weight(self) -> jax.Array:
        """The head [v, d], which is the embedding table when tied."""
        return self.embedding[...] if self.head is None else self.head.weight[...]

    def create_cache(self, batch: int, slots: int) -> DenseCache:
        """An empty dense cache for `batch` rows of up to `slots` positions."""
        c = self.config
        return DenseCache.create(c.num_layers, batch, slots, c.num_kv_heads, c.head_dim, self.dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embeds tokens [...] -> [..., d]; any row of the table, padding rows included."""
        return jnp.take(self.embedding[...], tokens, axis=0)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, cache: Cache, tap_ids: Sequence[int] = ()
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Runs the decoder.

        Args:
          tokens: [b, t] ids.
          positions: [b, t] absolute positions; negative ones are padding: they are not stored and their output is void.
          cache: keys and values of everything before.
          tap_ids: layers whose outputs to return, strictly increasing.

        Returns:
          Hidden states after the final norm [b, t, d], taps joined on the last axis [b, t, len(tap_ids) * d], and the
          cache.
        """
        x = self.embed(tokens)
        cos, sin = rotation(self.config.rope, self.config.head_dim, positions)
        taps = [x] if -1 in tap_ids else []
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                x, cache = layer(x, i, positions, cos, sin, cache)
            if i in tap_ids:
                taps.append(x)
        joined = jnp.concatenate(taps, axis=-1) if taps else jnp.zeros((*x.shape[:-1], 0), x.dtype)
        return self.norm(x), joined, cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Head on hidden [..., d] -> float32 logits [..., v]; padding rows get -inf, so they are never sampled."""
        logits = linear(hidden, self.head_weight).astype(jnp.float32)
        return tokens_only(logits, self.config.vocab_size, self.config.num_tokens)


def tokens_only(logits: jax.Array, vocab_size: int, num_tokens: int, ids: jax.Array | None = None) -> jax.Array:
    """Logits [..., rows] with -inf where a row is padding of the table and no token.

    Args:
      ids: [rows] target ids of the rows; None when the rows are the whole table.
    """
    if num_tokens == vocab_size:
        return logits
    ids = jnp.arange(vocab_size) if ids is None else ids
    return jnp.where(ids < num_tokens, logits, -jnp.inf)


def check_taps(tap_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Validates tap ids against a target's depth.

    Raises:
      ValueError: empty, unsorted, repeated, out of range, or the last layer (its output is what the head reads, and the
        reference implementations disagree whether that is before or after the final norm).
    """
    ids = tuple(int(i) for i in tap_ids)
    if not ids or any(b <= a for a, b in pairwise(ids)) or ids[0] < -1 or ids[-1] > num_layers - 2:
        raise ValueError(
            f"tap ids must be strictly increasing within -1..{num_layers - 2} for a target of {num_layers} layers "
            f"(-1 is the embedding output, the last layer {num_layers - 1} is refused), got {list(ids)}."
        )
    return ids
