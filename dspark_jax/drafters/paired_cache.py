"""The context of a drafter that pairs a position's state with the token that follows it."""

import dataclasses

import jax
import jax.numpy as jnp

from dspark_jax.models.cache import DenseCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairedCache:
    """Keys and values of the rows whose token is known, and the states of the latest positions.

    Which token follows a position is open until the next round's anchor stands, which may be behind any of the tokens
    just verified: so the states of one round's positions are kept.

    Attributes:
      context: one layer; row i lives in slot i.
      states: [b, w, d], that of position i in slot i mod w.
    """

    context: DenseCache
    states: jax.Array

    def state(self, position: jax.Array) -> jax.Array:
        """States [b, d] of one of the latest w positions [b]."""
        slot = position[:, None, None] % self.states.shape[1]
        return jnp.take_along_axis(self.states, slot, axis=1)[:, 0]

    def keep(self, states: jax.Array, positions: jax.Array) -> "PairedCache":
        """With the states [b, t, d] of the last w of `positions` [b, t]."""
        w = self.states.shape[1]
        kept = (positions >= 0) & (positions > jnp.max(positions, axis=1, keepdims=True) - w)
        rows, slots = jnp.arange(states.shape[0])[:, None], jnp.where(kept, positions % w, w)
        return dataclasses.replace(self, states=self.states.at[rows, slots].set(states, mode="drop"))
