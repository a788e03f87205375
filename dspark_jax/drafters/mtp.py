"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): the single-token drafter of the baselines."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.drafters.autoregressive import Autoregressive
from dspark_jax.drafters.autoregressive_config import MTPConfig
from dspark_jax.models.layers import RMSNorm


class MTP(Autoregressive):
    """A layer like the target's on a projection of [embedding; final hidden state] (equations 21 to 23 there)."""

    config: MTPConfig

    def __init__(self, config: MTPConfig, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
        d = config.hidden_size
        super().__init__(config, (d, 2 * d), d, dtype=dtype, rngs=rngs)
        self.embedding_norm = RMSNorm(d, config.rms_norm_eps, dtype)

    def project(self, read: jax.Array) -> jax.Array:
        return read

    def enter(self, embedded: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = self.fc(jnp.concatenate([self.embedding_norm(embedded), self.hidden_norm(state)], axis=-1))
        return x, self.layer.attention_norm(x)

    def repeated(self, block_size: int) -> "MTP":
        """The same module run `block_size` times a round, as in MTP-3 and MTP-5; shares its parameters.

        Drafts past the horizon it was trained for rest on states it never saw in training: expect few to be accepted.

        Raises:
          ValueError: block_size is not at least 1.
        """
        graph, state = nnx.split(self)
        other = nnx.merge(graph, state)
        other.config = dataclasses.replace(self.config, block_size=block_size)
        return other
