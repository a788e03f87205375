"""Random keys: one a request, folded by position, purpose and slot, so that no draw shares its key with another."""

import enum

import jax
import jax.numpy as jnp


class Purpose(enum.IntEnum):
    """What a draw is for."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3


def slot_keys(keys: jax.Array, position: jax.Array, purpose: Purpose, slots: int) -> jax.Array:
    """Keys [b, slots] of one round.

    The position is the anchor's, not the drawn token's: a token position can be drafted again after a rejection, but an
    anchor never stands twice at one position.

    Args:
      keys: [b] request keys; position: [b] of the anchor.
    """

    def row(key, position):
        key = jax.random.fold_in(jax.random.fold_in(key, position), purpose)
        return jax.vmap(lambda slot: jax.random.fold_in(key, slot))(jnp.arange(slots))

    return jax.vmap(row)(keys, position)
