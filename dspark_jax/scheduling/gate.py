"""Whether to draft at all."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.scheduling.costs import StepCosts
from dspark_jax.scheduling.policies import LaggedCapacity, Outcome, Policy
from dspark_jax.scheduling.pool import Round


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ledger:
    """What drafting brought and took; recent rounds weigh more.

    Attributes:
      tokens: of drafted rounds; squares: sum of the square of each request's; rounds: of requests, how many they are.
      seconds: of those rounds, for each request, in units of a plain round.
      on: whether drafting paid when last asked.
      waited: plain rounds since the last drafted one; patience: how many to wait for.
    """

    tokens: jax.Array
    squares: jax.Array
    rounds: jax.Array
    seconds: jax.Array
    on: jax.Array
    waited: jax.Array
    patience: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GateState:
    """What a gate remembers.

    Attributes:
      inner: state of the policy behind it.
      ledgers: fields [levels], one for each number of running requests up to 1, 2, 4, 8 ..
    """

    inner: Any
    ledgers: Ledger

    def level(self, round: Round) -> jax.Array:
        """Which ledger a round belongs to."""
        levels = len(self.ledgers.on)
        return jnp.minimum(jnp.searchsorted(2 ** jnp.arange(levels), round.requests), levels - 1)

    def ledger(self, round: Round) -> Ledger:
        """The round's own, fields []."""
        return jax.tree.map(lambda x: x[self.level(round)], self.ledgers)


@dataclass(frozen=True)
class Gate(Policy):
    """Lets a policy draft while drafting pays, by tokens that were really accepted; otherwise rounds are plain.

    Drafting costs even where nothing is verified, and confidences may be wrong: the gate compares the tokens a second
    of drafted rounds with those of plain ones. It closes when drafted rounds are slower by more than chance explains,
    opens when they are faster by `minimum_gain`, and in between stays as it is. While it is closed, it tries a drafted
    round now and then: trials take five times `trial_share` of the time at first, then, at doubling intervals, just
    that. A trial halves the weight of what was known, and one that pays is repeated at once.

    All it knows is from earlier rounds; what it knows outlasts the requests it is from. What holds for few requests at
    a time need not hold for many, so there is a ledger for each number of them, by powers of two.

    Attributes:
      policy: decides on lengths; costs: of the machine that runs the steps.
      minimum_gain: share by which drafting must be faster before it starts again.
      memory: share of its weight that a drafted round keeps with every later one.
      doubt: standard deviations that chance may explain.
      trial_share: share of the time that trials may take in the long run.

    Raises:
      ValueError: an option out of range, or a policy that looks ahead.
    """

    policy: Policy
    costs: StepCosts
    minimum_gain: float = 0.02
    memory: float = 0.999
    doubt: float = 1.0
    trial_share: float = 0.01

    def __post_init__(self) -> None:
        if self.policy.anticipates:
            raise ValueError(f"{self.policy} decides on tokens by what they drew; it is for measuring only.")
        if self.minimum_gain < 0 or self.doubt < 0:
            raise ValueError(f"minimum_gain and doubt must be 0 or more, got {self.minimum_gain} and {self.doubt}.")
        if not (0 <= self.memory < 1 and 0 < self.trial_share <= 1):
            raise ValueError(
                f"memory must be within [0, 1), trial_share within (0, 1]; got {self.memory} and {self.trial_share}."
            )

    def initial_state(self, rows: int, block_size: int) -> GateState:
        levels = (rows - 1).bit_length() + 1
        zero, none = jnp.zeros(levels), jnp.zeros(levels, jnp.int32)
        ledgers = Ledger(zero, zero, zero, zero, jnp.ones(levels, bool), none, none)
        return GateState(self.policy.initial_state(rows, block_size), ledgers)

    def renew(self, state: GateState, fresh: jax.Array) -> GateState:
        return replace(state, inner=self.policy.renew(state.inner, fresh))

    def drafts(self, round: Round, state: GateState) -> jax.Array:
        ledger = state.ledger(round)
        return (self._pays(ledger) | (ledger.waited >= ledger.patience)) & self.policy.drafts(round, state.inner)

    def _pays(self, state: Ledger) -> jax.Array:
        """Whether drafting pays, as far as is known; yes while nothing is."""
        variance = state.squares - state.tokens**2 / jnp.maximum(state.rounds, 1)
        # Few rounds may look alike by chance: one token squared stands in for what they do not show.
        chance = self.doubt * jnp.sqrt(jnp.maximum(variance, 0) + 1)
        stays = state.tokens + chance >= state.seconds
        opens = state.tokens >= (1 + self.minimum_gain) * state.seconds
        return (state.rounds == 0) | jnp.where(state.on, stays, opens)

    def lengths(self, survival: jax.Array, round: Round, state: GateState) -> jax.Array:
        return self.policy.lengths(survival, round, state.inner)

    def update(self, state: GateState, round: Round, outcome: Outcome | None) -> GateState:
        level, ledger = state.level(round), self._noted(state.ledger(round), round, outcome)
        ledgers = jax.tree.map(lambda all, one: all.at[level].set(one), state.ledgers, ledger)
        return GateState(self.policy.update(state.inner, round, outcome), ledgers)

    def _noted(self, state: Ledger, round: Round, outcome: Outcome | None) -> Ledger:
        on = self._pays(state)
        if outcome is None:
            return replace(state, on=on, waited=state.waited + 1)
        drafts = jnp.max(outcome.lengths) if round.padded else jnp.sum(outcome.lengths)
        plain = round.step(self.costs, jnp.zeros((), jnp.int32), drafted=False)
        seconds = round.requests * round.step(self.costs, drafts) / plain
        emitted = jnp.where(round.running, 1.0 + outcome.accepted, 0)
        tokens = jnp.sum(emitted)
        good = tokens >= (1 + self.minimum_gain) * seconds
        loss = seconds / jnp.maximum(round.requests, 1) - 1
        longest = jnp.maximum(loss / self.trial_share, 1).astype(jnp.int32)
        first = jnp.maximum(longest // 5, 1)
        patience = jnp.where(on, first, jnp.where(good, state.patience, jnp.clip(2 * state.patience, first, longest)))
        kept = jnp.where(on, self.memory, 0.5)
        return Ledger(
            tokens=kept * state.tokens + tokens,
            squares=kept * state.squares + jnp.sum(emitted**2),
            rounds=kept * state.rounds + round.requests,
            seconds=kept * state.seconds + seconds,
            on=on,
            waited=jnp.where(on | ~good, 0, patience),
            patience=patience,
        )

    def widths(self, rows: int, block_size: int) -> tuple[int, ...]:
        return self.policy.widths(rows, block_size)


def while_it_pays(costs: StepCosts, floor: int = 0) -> Gate:
    """The policy that commands and the server go by: lengths of a lagged capacity, behind a gate.

    Args:
      floor: drafts that every request gets in any case.
    """
    return Gate(LaggedCapacity(costs, memory=0.9, floor=floor), costs)
