"""Random keys: one a request, folded by position, purpose and slot, so that no draw shares its key with another."""

import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


class Purpose(enum.IntEnum):
    """What a draw is for."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3


def seeds_of(given: Sequence[int | None]) -> list[int]:
    """Seeds of requests, drawn fresh from the system for those that were given none."""
    fresh = np.random.SeedSequence().generate_state(len(given), np.uint64).tolist()
    return [new if seed is None else int(seed) for seed, new in zip(given, fresh, strict=True)]


def request_keys(seeds: Sequence[int]) -> jax.Array:
    """Keys [b] of requests by their seeds, 64 bits each."""
    words = np.array([(seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF) for seed in seeds], np.uint32)
    return jax.vmap(lambda word: jax.random.fold_in(jax.random.key(word[0]), word[1]))(jnp.asarray(words))


def slot_key(keys: jax.Array, position: jax.Array, purpose: jax.Array | Purpose, slot: jax.Array | int) -> jax.Array:
    """Keys [b] of one draw a row.

    The position is the anchor's, not the drawn token's: a token position can be drafted again after a rejection, but an
    anchor never stands twice at one position.

    Args:
      keys: [b] request keys; position: [b] of the anchor; purpose, slot: one for all or [b].
    """
    fold = jax.vmap(jax.random.fold_in)
    purpose, slot = (jnp.broadcast_to(x, keys.shape) for x in (purpose, slot))
    return fold(fold(fold(keys, position), purpose), slot)


def slot_keys(keys: jax.Array, position: jax.Array, purpose: Purpose, slots: int) -> jax.Array:
    """Keys [b, slots]: `slot_key` of every slot of one round."""
    return jax.vmap(lambda slot: slot_key(keys, position, purpose, slot), out_axes=1)(jnp.arange(slots))
