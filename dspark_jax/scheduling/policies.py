"""Verification-length policies: how many draft tokens of each request the target verifies.

Whether draft k of a request is verified may depend on its own confidence, on drafts that are verified before it (which
its confidence knows), and on earlier rounds; never on what it or anything behind it drew. With many requests the same
holds for the whole batch: there must be an order in which every draft is decided on by what was admitted before it.
Lengths that know more of each other, each harmless to its own request, would tie the outputs of two requests together.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from dspark_jax.scheduling.costs import StepCosts
from dspark_jax.scheduling.pool import Pool, Round, pool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outcome:
    """What came of a drafted round.

    Attributes:
      survival: [r, g]; lengths, accepted: [r] drafts verified, and accepted.
    """

    survival: jax.Array
    lengths: jax.Array
    accepted: jax.Array


class Policy(Protocol):
    """A round asks `drafts` before it drafts, `lengths` before it verifies, and ends with `update`.

    Policies are pure and hashable, so that a compiled program belongs to one. Those that remember nothing and always
    draft only say `lengths` and `widths`.
    """

    anticipates: ClassVar[bool] = False
    """Whether lengths know what the tokens they admit drew: for measuring only, never for decoding."""

    def initial_state(self, rows: int, block_size: int) -> Any:
        """What it remembers of `rows` rows before their first round: arrays, in any tree."""
        return ()

    def renew(self, state: Any, fresh: jax.Array) -> Any:
        """The state once new requests have taken the rows marked in `fresh` [r]."""
        return state

    def drafts(self, round: Round, state: Any) -> jax.Array | bool:
        """Whether this round drafts at all; otherwise every request decodes one token plainly."""
        return True

    def lengths(self, survival: jax.Array, round: Round, state: Any) -> jax.Array:
        """Lengths [r] within 0..min(g, room) from survival [r, g]; 0 for rows that are not running."""
        ...

    def update(self, state: Any, round: Round, outcome: Outcome | None) -> Any:
        """The state after a round; `outcome` is None if it did not draft."""
        return state

    def widths(self, rows: int, block_size: int) -> tuple[int, ...]:
        """Token counts a row (anchor included) to compile padded verification for, ascending; none needs more."""
        ...


@dataclass(frozen=True)
class Fixed(Policy):
    """Always verifies `length` drafts (None: the whole block).

    Raises:
      ValueError: the length is negative.
    """

    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 0:
            raise ValueError(f"length must be 0 or more, got {self.length}.")

    def lengths(self, survival: jax.Array, round: Round, state: Any = ()) -> jax.Array:
        g = survival.shape[1]
        fits = round.fits(g) & (jnp.arange(g) < (g if self.length is None else self.length))
        return jnp.sum(fits, axis=-1, dtype=jnp.int32)

    def widths(self, rows: int, block_size: int) -> tuple[int, ...]:
        return (1 + (block_size if self.length is None else min(self.length, block_size)),)


@dataclass(frozen=True)
class Threshold(Policy):
    """Verifies the longest prefix whose survival (product of confidences) stays at or above `survival`.

    Raises:
      ValueError: the survival is outside 0..1.
    """

    survival: float = 0.4

    def __post_init__(self) -> None:
        if not 0 <= self.survival <= 1:
            raise ValueError(f"survival must be within [0, 1], got {self.survival}.")

    def lengths(self, survival: jax.Array, round: Round, state: Any = ()) -> jax.Array:
        good = round.fits(survival.shape[1]) & (survival >= self.survival)
        return jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=-1), axis=-1, dtype=jnp.int32)

    def widths(self, rows: int, block_size: int) -> tuple[int, ...]:
        powers = [w for w in (1, 2, 4, 8, 16, 32) if w <= block_size]
        return (*powers, block_size + 1)


@dataclass(frozen=True)
class Plain(Policy):
    """Never drafts: plain decoding, with the drafter's context kept up to date."""

    def drafts(self, round: Round, state: Any) -> bool:
        return False

    def lengths(self, survival: jax.Array, round: Round, state: Any = ()) -> jax.Array:
        return jnp.zeros(survival.shape[0], jnp.int32)

    def widths(self, rows: int, block_size: int) -> tuple[int, ...]:
        return (1,)


@dataclass(frozen=True)
class _ByCost(Policy):
    """Lengths from what a step costs.

    Attributes:
      costs: of the machine that runs the steps.
      minimum_gain: share by which Theta must rise before a dearer step is taken.
      floor: drafts every request gets in any case, so that none starves.

    Raises:
      ValueError: a negative gain or floor.
    """

    costs: StepCosts
    minimum_gain: float = 0.0
    floor: int = 0

    def __post_init__(self) -> None:
        if self.minimum_gain < 0 or self.floor < 0:
            raise ValueError(f"minimum_gain and floor must be 0 or more, got {self.minimum_gain} and {self.floor}.")

    def pool(self, survival: jax.Array, round: Round) -> Pool:
        return pool(survival, round, self.costs, self.floor)

    def widths(self, rows: int, block_size: int) -> tuple[int, ...]:
        return self.costs.widths(rows, block_size)


@dataclass(frozen=True)
class EarlyStop(_ByCost):
    """Algorithm 1: admits drafts by survival of this round while each raises Theta.

    Best while Theta has one peak over B. Where cost climbs in stairs it stops at the edge of a stair that one more
    draft does not pay for, though a whole stair of them would; see `LaggedCapacity`.
    """

    def lengths(self, survival: jax.Array, round: Round, state: Any = ()) -> jax.Array:
        candidates = self.pool(survival, round)
        return candidates.lengths(candidates.early_stop(self.minimum_gain))


@dataclass(frozen=True)
class Oracle(_ByCost):
    """The best lengths for the survival of this round, known whole: what no policy that keeps the law can do.

    It decides on tokens by what they drew (the paper's counterexample), so it is for measuring gaps only.
    """

    anticipates: ClassVar[bool] = True

    def lengths(self, survival: jax.Array, round: Round, state: Any = ()) -> jax.Array:
        candidates = self.pool(survival, round)
        return candidates.lengths(candidates.best(self.minimum_gain))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Lagged:
    """Survival as known one and two steps ago.

    Attributes:
      old: [r, g] from rounds that are at least two steps back, valid where `has_old` [r].
      recent: [r, g] of the last round, valid where `has_recent` [r].
    """

    old: jax.Array
    recent: jax.Array
    has_old: jax.Array
    has_recent: jax.Array


@dataclass(frozen=True)
class LaggedCapacity(_ByCost):
    """The production form: how many drafts a step holds comes from survival two steps old, which ones from this round.

    The search for the capacity sees the whole curve, so no stair traps it, and it ends at the edge of a bucket, whose
    rows are all filled. It cannot know what this round draws, and a server can launch the step two rounds ahead.

    A request without survival that old counts as the mean of the others; while there are none, as one whose every
    confidence is `prior`. One that sat out rounds counts as it was last known.

    Attributes:
      memory: share of what was known that each new round keeps; 0 takes the single round two steps back.

    Raises:
      ValueError: memory or prior out of range.
    """

    memory: float = 0.0
    prior: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.memory < 1 and 0 <= self.prior <= 1):
            raise ValueError(f"memory must be within [0, 1), prior within [0, 1]; got {self.memory} and {self.prior}.")

    def initial_state(self, rows: int, block_size: int) -> Lagged:
        zeros, no = jnp.zeros((rows, block_size)), jnp.zeros(rows, bool)
        return Lagged(zeros, zeros, no, no)

    def renew(self, state: Lagged, fresh: jax.Array) -> Lagged:
        return replace(state, has_old=state.has_old & ~fresh, has_recent=state.has_recent & ~fresh)

    def capacity(self, round: Round, state: Lagged) -> jax.Array:
        """Units of the pool to admit, see `Pool`: known before this round, and before the last."""
        expected = self.pool(self.expected(round, state), round)
        return expected.bucket(expected.best(self.minimum_gain))

    def expected(self, round: Round, state: Lagged) -> jax.Array:
        """Survival [r, g] to expect of this round."""
        known = round.running & state.has_old
        mean = jnp.sum(jnp.where(known[:, None], state.old, 0), axis=0) / jnp.maximum(jnp.sum(known), 1)
        guess = jnp.where(jnp.any(known), mean, self.prior ** jnp.arange(1.0, 1 + len(mean)))
        return jnp.where(known[:, None], state.old, guess)

    def lengths(self, survival: jax.Array, round: Round, state: Lagged) -> jax.Array:
        candidates = self.pool(survival, round)
        return candidates.lengths(jnp.minimum(self.capacity(round, state), candidates.most))

    def update(self, state: Lagged, round: Round, outcome: Outcome | None) -> Lagged:
        blend = jnp.where(
            state.has_old[:, None], self.memory * state.old + (1 - self.memory) * state.recent, state.recent
        )
        old = jnp.where(state.has_recent[:, None], blend, state.old)
        has_old = state.has_old | state.has_recent
        if outcome is None:
            return Lagged(old, state.recent, has_old, jnp.zeros_like(has_old))
        return Lagged(old, outcome.survival, has_old, round.running)
