"""A fake machine: a policy meets drawn or recorded blocks, under a clock that counts what a cost table says."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.calibration.survival import sigmoid
from dspark_jax.scheduling.costs import StepCosts
from dspark_jax.scheduling.policies import Outcome, Policy
from dspark_jax.scheduling.pool import Round


@dataclass(frozen=True)
class Blocks:
    """What drafters say of their drafts, and what becomes of them; one array a domain, its rows in the order of rounds.

    Attributes:
      confidence: [n, g] of every block, what the policy sees.
      acceptance: [n, g] probability that a draft is accepted once all before it were.

    Raises:
      ValueError: no domain, or arrays of other shapes.
    """

    confidence: tuple[np.ndarray, ...]
    acceptance: tuple[np.ndarray, ...]

    def __post_init__(self) -> None:
        shapes = [[x.shape for x in arrays] for arrays in (self.confidence, self.acceptance)]
        if not self.confidence or shapes[0] != shapes[1] or len({(len(s), s[-1]) for s in shapes[0]}) != 1:
            raise ValueError(f"expected [n, g] confidences and acceptances of every domain, got shapes {shapes}.")

    @property
    def block_size(self) -> int:
        return self.confidence[0].shape[1]

    @property
    def stacked(self) -> tuple[np.ndarray, np.ndarray]:
        """Confidences and acceptances [domains, n, g]; domains with fewer blocks than others begin again."""
        longest = max(map(len, self.confidence))
        repeated = lambda arrays: np.stack([np.resize(x, (longest, self.block_size)) for x in arrays])  # noqa: E731
        return repeated(self.confidence), repeated(self.acceptance)

    @classmethod
    def drawn(
        cls,
        acceptance: Sequence[Sequence[float]],
        *,
        spread: float = 1.0,
        persistence: float = 0.5,
        boast: float = 1.0,
        rounds: int = 4096,
        seed: int = 0,
    ) -> "Blocks":
        """Blocks that are easy or hard as a whole, the next one somewhat like the last.

        Args:
          acceptance: for each domain, the typical acceptance at each of g positions, within (0, 1).
          spread: standard deviation of a block's log-odds around them; persistence: correlation with the block before.
          boast: factor on the log-odds that the confidence head reports; 1 is calibrated.
        """
        rng = np.random.default_rng(seed)
        odds = []
        for typical in np.asarray(acceptance, float):
            hardness = np.zeros(rounds)
            for t, new in enumerate(rng.normal(size=rounds)):
                hardness[t] = persistence * hardness[t - 1] + np.sqrt(1 - persistence**2) * new if t else new
            own = rng.normal(size=(rounds, len(typical)))
            odds.append(np.log(typical / (1 - typical)) + spread * (hardness[:, None] + own) / np.sqrt(2))
        return cls(*(tuple(sigmoid(factor * o) for o in odds) for factor in (boast, 1.0)))

    @classmethod
    def recorded(cls, confidence: Sequence[np.ndarray], accepted: Sequence[np.ndarray]) -> "Blocks":
        """Blocks as they went: confidences [n, g] and accepted drafts [n] of each domain, whole blocks verified."""
        certain = [
            (np.arange(c.shape[1]) < a[:, None]).astype(float) for c, a in zip(confidence, accepted, strict=True)
        ]
        return cls(tuple(confidence), tuple(certain))


@dataclass(frozen=True)
class Load:
    """What a simulation came to.

    Attributes:
      seconds, tokens: in all; rounds: steps taken; drafted: share of them that drafted.
      budget: tokens verified a request and round, 1 + l, in plain rounds 1; tau: tokens emitted a request and round.
      speeds: [n] tokens/s of every answered request, from its first round to its last.
      drafts: [n] drafts verified a round for each of them.
      waits: [n] seconds each waited for a row.
    """

    seconds: float
    tokens: int
    rounds: int
    drafted: float
    budget: float
    tau: float
    speeds: np.ndarray = field(repr=False)
    drafts: np.ndarray = field(repr=False)
    waits: np.ndarray = field(repr=False)

    @property
    def throughput(self) -> float:
        """Tokens/s of all requests together."""
        return self.tokens / self.seconds

    @property
    def fairness(self) -> float:
        """Jain's index of the requests' speeds: 1 if all are equal, 1 / n if one has everything; nan without any."""
        return (
            float(self.speeds.sum() ** 2 / (len(self.speeds) * (self.speeds**2).sum())) if len(self.speeds) else np.nan
        )

    @property
    def slowest(self) -> float:
        """Speed that one request in twenty falls short of; nan without any."""
        return float(np.quantile(self.speeds, 0.05)) if len(self.speeds) else np.nan


def simulate(
    policy: Policy,
    costs: StepCosts,
    blocks: Blocks,
    *,
    rows: int,
    rounds: int = 400,
    rate: float | None = None,
    answer: int = 128,
    padded: bool = False,
    seed: int = 0,
) -> Load:
    """Runs rounds of up to `rows` requests. Everything random is drawn by request and round, so that policies compared
    under one seed meet the same requests, blocks and luck, and a run repeats to the last bit.

    Args:
      costs: what the clock counts; the policy may believe in others.
      rate: requests that arrive a second; None keeps every row busy.
      answer: mean tokens of a request, which are uniform within half of that either way.

    Raises:
      ValueError: the costs have no step of `rows` requests, or rows, rounds or answer are under 1.
    """
    if min(rows, rounds, answer) < 1:
        raise ValueError(f"rows, rounds and answer must be at least 1, got {rows}, {rounds} and {answer}.")
    g = blocks.block_size
    costs.widths(rows, g)
    said, truth = blocks.stacked
    luck = np.random.default_rng(seed).random(said.shape)
    survival, passed = np.cumprod(said, axis=2).astype(np.float32), np.cumprod(luck < truth, axis=2).sum(axis=2)
    arrivals = _arrivals(rate, seed)
    seat = {name: np.zeros(rows, np.int64) for name in ("left", "domain", "block", "rounds", "verified", "size")}
    since, clock, tokens, done, number = np.zeros(rows), 0.0, 0, [], 0
    arrival, waits = next(arrivals), []
    request_rounds = drafted_rounds = verified = 0
    state = policy.initial_state(rows, g)
    for _ in range(rounds):
        if not seat["left"].any():
            clock = max(clock, arrival)
        fresh = np.zeros(rows, bool)
        for row in np.flatnonzero(seat["left"] == 0):
            if arrival > clock:
                break
            size, start = np.random.default_rng((seed, number)).integers(
                (answer + 1) // 2, [answer * 3 // 2 + 1, 2**31]
            )
            for name, value in {"left": size, "size": size, "domain": number % len(said), "block": start}.items():
                seat[name][row] = value
            seat["rounds"][row] = seat["verified"][row] = 0
            since[row], fresh[row] = clock, True
            waits.append(0.0 if rate is None else clock - arrival)
            number, arrival = number + 1, next(arrivals)
        running = seat["left"] > 0
        round = Round(jnp.asarray(running), jnp.asarray(np.maximum(seat["left"] - 1, 0), jnp.int32), padded)
        at = seat["domain"], seat["block"] % said.shape[1]
        known = jnp.asarray(survival[at])
        state, drafts, lengths, seconds = _decide(policy, costs, state, fresh, round, known)
        accepted = np.minimum(passed[at], lengths)
        state = _tell(policy, state, round, Outcome(known, lengths, jnp.asarray(accepted, jnp.int32)), drafts)
        clock += float(seconds)
        emitted = np.where(running, np.minimum(accepted + 1, seat["left"]), 0)
        seat["left"] -= emitted
        seat["rounds"] += running
        seat["verified"] += np.asarray(lengths)
        seat["block"] += 1
        tokens += int(emitted.sum())
        request_rounds += int(running.sum())
        drafted_rounds += int(drafts)
        verified += int(lengths.sum())
        for row in np.flatnonzero(running & (seat["left"] == 0)):
            done.append((seat["size"][row] / (clock - since[row]), seat["verified"][row] / seat["rounds"][row]))
    speeds, drafts = np.array(done, float).reshape(-1, 2).T
    return Load(
        seconds=clock,
        tokens=tokens,
        rounds=rounds,
        drafted=drafted_rounds / rounds,
        budget=1 + verified / request_rounds,
        tau=tokens / request_rounds,
        speeds=speeds,
        drafts=drafts,
        waits=np.array(waits),
    )


def _arrivals(rate: float | None, seed: int):
    """Times at which requests arrive: all at once, or a Poisson process."""
    rng, time = np.random.default_rng((seed, 2**32)), 0.0
    while True:
        if rate is not None:
            time += rng.exponential(1 / rate)
        yield time


@partial(jax.jit, static_argnums=(0, 1))
def _decide(policy: Policy, costs: StepCosts, state, fresh, round: Round, survival):
    """Tells the policy of fresh requests and asks it; also seconds of the step."""
    state = policy.renew(state, fresh)
    drafts = jnp.asarray(policy.drafts(round, state))
    lengths = jnp.where(drafts, policy.lengths(survival, round, state), 0)
    units = jnp.max(lengths) if round.padded else jnp.sum(lengths)
    return state, drafts, lengths, jnp.where(drafts, round.step(costs, units), round.step(costs, units, drafted=False))


@partial(jax.jit, static_argnums=0)
def _tell(policy: Policy, state, round: Round, outcome: Outcome, drafts):
    """The policy's memory after the round."""
    told = partial(policy.update, state, round)
    return jax.lax.cond(drafts, lambda: told(outcome), lambda: told(None))
