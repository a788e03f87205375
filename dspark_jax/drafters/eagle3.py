"""Eagle3 (arXiv 2503.01840): several of the target's hidden states, fused, beside the token that followed them."""

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.drafters.autoregressive import Autoregressive
from dspark_jax.drafters.autoregressive_config import Eagle3Config


class Eagle3(Autoregressive):
    """One layer whose attention reads [embedding; state] of twice the width, and whose residual stream is the state."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
        d = config.hidden_size
        super().__init__(config, (d, len(config.tap_ids) * d), 2 * d, dtype=dtype, rngs=rngs)

    def project(self, read: jax.Array) -> jax.Array:
        return self.fc(read)

    def enter(self, embedded: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return state, jnp.concatenate([self.layer.attention_norm(embedded), self.hidden_norm(state)], axis=-1)
