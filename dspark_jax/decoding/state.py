"""What one batch of generations carries from round to round.

Every leaf has the batch as its first axis, except what the policy remembers.
"""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.decoding.sampling import Sampling


class Finish(enum.IntEnum):
    """Why a row is not running."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    EMPTY = 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Record:
    """Per-round statistics, [b, rounds] and [b, rounds, g]; valid up to `State.rounds`.

    Attributes:
      accepted: drafts accepted and emitted.
      scheduled: drafts verified, up to a stop id; positions beyond are censored, not rejected.
      confidences: confidence logits of the block, nan in a round without drafts.
      drafts: the tokens drafted, -1 in a round without.
    """

    accepted: jax.Array
    scheduled: jax.Array
    confidences: jax.Array
    drafts: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """A batch of generations.

    Attributes:
      tokens: [b, s] prompt and output; the token at position i stands in column i.
      prompt_length, length: [b]; the anchor stands at length - 1 and is not yet in the caches.
      limit: [b] length at which a row ends.
      finish: [b] `Finish` codes.
      keys: [b] request keys.
      stop_ids: [b, n] ids that end a row; -1 pads.
      cache, draft_cache: context of target and drafter (None without one).
      rounds: [b] rounds a row took part in.
      policy: what the policy remembers.
    """

    tokens: jax.Array
    prompt_length: jax.Array
    length: jax.Array
    limit: jax.Array
    finish: jax.Array
    keys: jax.Array
    sampling: Sampling
    stop_ids: jax.Array
    cache: Any
    draft_cache: Any
    rounds: jax.Array
    record: Record
    policy: Any = ()

    @property
    def running(self) -> jax.Array:
        """[b] booleans."""
        return self.finish == Finish.RUNNING

    def replace(self, **changes: Any) -> "State":
        return dataclasses.replace(self, **changes)

    def commit(self, block: jax.Array, count: jax.Array) -> "State":
        """Appends the first `count` [b] tokens of block [b, w], cut at the first stop id and at the limit."""
        slots = jnp.arange(block.shape[1])
        count = jnp.where(self.running, jnp.minimum(count, self.limit - self.length), 0)
        count, stopped = until_stop(block, count, self.stop_ids)
        columns = jnp.where(slots < count[:, None], self.length[:, None] + slots, self.tokens.shape[1])
        rows = jnp.arange(block.shape[0])[:, None]
        length = self.length + count
        ended = jnp.where(stopped, Finish.STOP, jnp.where(length >= self.limit, Finish.LENGTH, self.finish))
        return self.replace(
            tokens=self.tokens.at[rows, columns].set(block, mode="drop"),
            length=length,
            finish=jnp.where(self.running, ended, self.finish).astype(self.finish.dtype),
        )


def until_stop(block: jax.Array, count: jax.Array, stop_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first `count` [b] tokens of block [b, w] up to one of stop_ids [b, n]: how many, and whether there is one."""
    stops = (block[..., None] == stop_ids[:, None]).any(-1) & (jnp.arange(block.shape[1]) < count[:, None])
    stopped = stops.any(-1)
    return jnp.where(stopped, jnp.argmax(stops, axis=-1) + 1, count), stopped
