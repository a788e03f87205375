"""The sequential heads (equations 5 and 6) and the confidence head (equation 7).

Every head turns the drafted prefix into a rank-r latent; the bias on the draft logits is `w2 @ latent` for all of them.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.models.layers import Linear


class MarkovHead(nnx.Module):
    """`vanilla`: first-order, latent = W1[x_{k-1}] (equation 5). Base of the other two."""

    def __init__(self, config: DrafterConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.rank = config.markov_rank
        shape = (config.vocab_size, config.markov_rank)
        self.w1 = nnx.Param(jax.random.normal(rngs.params(), shape, dtype))
        self.w2 = nnx.Param(jnp.zeros((config.draft_rows, config.markov_rank), dtype))

    def embed(self, previous: jax.Array) -> jax.Array:
        """W1 rows of the previous tokens [...] -> [..., r]."""
        return jnp.take(self.w1[...], previous, axis=0)

    def initial_state(self, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        """The head's state before the block; empty for heads without memory."""
        return jnp.zeros((*shape, 0), dtype)

    def step(self, previous: jax.Array, hidden: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Latent of one position.

        Args:
          previous: [...] ids of x_{k-1} (the anchor for k = 1); hidden: [..., d] backbone output h_k; state: [..., s].

        Returns:
          Latent [..., r] and the next state.
        """
        return self.embed(previous), state

    def block(self, previous: jax.Array, hidden: jax.Array) -> jax.Array:
        """Teacher-forced latents of whole blocks: previous [..., g], hidden [..., g, d] -> [..., g, r]."""
        return self.step(previous, hidden, self.initial_state(previous.shape, hidden.dtype))[0]


class GatedMarkovHead(MarkovHead):
    """`gated`: latent = sigmoid(G [h_k; W1[x_{k-1}]]) * W1[x_{k-1}]."""

    def __init__(self, config: DrafterConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.gate = Linear(config.hidden_size + self.rank, self.rank, bias=True, dtype=dtype, rngs=rngs)

    def step(self, previous, hidden, state):
        embedded = self.embed(previous).astype(hidden.dtype)
        gate = jax.nn.sigmoid(self.gate(jnp.concatenate([hidden, embedded], axis=-1)))
        return gate * embedded, state


class RNNHead(MarkovHead):
    """`rnn`: a gated recurrence over the drafted prefix (equation 6)."""

    def __init__(self, config: DrafterConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.joint = Linear(2 * self.rank + config.hidden_size, 3 * self.rank, bias=True, dtype=dtype, rngs=rngs)

    def initial_state(self, shape, dtype):
        return jnp.zeros((*shape, self.rank), dtype)

    def step(self, previous, hidden, state):
        return self.advance(self.embed(previous), hidden, state)

    def block(self, previous, hidden):
        # Embedded at once: the gradient of the table is then one scatter, not one a position.
        steps = jnp.moveaxis(self.embed(previous), -2, 0), jnp.moveaxis(hidden, -2, 0)
        state = self.initial_state(previous.shape[:-1], hidden.dtype)
        return jnp.moveaxis(jax.lax.scan(lambda s, x: self.advance(*x, s)[::-1], state, steps)[1], 0, -2)

    def advance(self, embedded: jax.Array, hidden: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Latent [..., r] of one position and the next state, for W1 rows [..., r] of the previous token."""
        z = jnp.concatenate([state, embedded.astype(hidden.dtype), hidden], axis=-1)
        gate, candidate, output = jnp.split(self.joint(z), 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        return jnp.tanh(output), gate * state + (1 - gate) * jnp.tanh(candidate)


HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNHead}


class ConfidenceHead(nnx.Module):
    """Logit of the probability that a draft token survives, given that its prefix did (equation 7)."""

    def __init__(self, config: DrafterConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width = config.hidden_size + (config.markov_rank if config.confidence_with_markov else 0)
        self.with_markov = config.confidence_with_markov
        self.proj = Linear(width, 1, bias=True, dtype=dtype, rngs=rngs)

    def __call__(self, hidden: jax.Array, embedded: jax.Array | None) -> jax.Array:
        """hidden [..., d] and Markov embeddings [..., r] (ignored without them) -> float32 logits [...]."""
        if self.with_markov:
            assert embedded is not None
            hidden = jnp.concatenate([hidden, embedded.astype(hidden.dtype)], axis=-1)
        return self.proj(hidden)[..., 0].astype(jnp.float32)
