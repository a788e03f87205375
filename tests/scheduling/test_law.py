"""The output law under every policy, by enumeration of all that two requests can draw, in float64.

A round's tokens are completed by plain decoding, so a law is one of the first g + 1 tokens of each request. The two
laws must be the target's and independent: lengths that are harmless to each request alone can tie both together.
"""

import dataclasses
import functools
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.scheduling import (
    EarlyStop,
    Fixed,
    Gate,
    LaggedCapacity,
    Oracle,
    Outcome,
    Plain,
    Policy,
    Round,
    Stairs,
    StepCosts,
    Threshold,
)

V, G = 2, 3
EXACT = 1e-9


def strings(length: int) -> np.ndarray:
    """All strings [V ** length, length]."""
    return np.array(list(itertools.product(range(V), repeat=length))).reshape(-1, length)


@dataclasses.dataclass(frozen=True)
class Chain:
    """A random target and drafter.

    Attributes:
      p, q: for k = 0..G, distributions [V ** k, V] of the token after every string of k tokens.
      confidence: for k = 0..G-1, [V ** k] what is said of draft k + 1 when its prefix is known, and nothing behind.
    """

    p: list[np.ndarray]
    q: list[np.ndarray]
    confidence: list[np.ndarray]

    @classmethod
    def random(cls, seed: int, kind: str = "true") -> "Chain":
        """kind: confidences are `true` acceptance probabilities, `wrong`, `certain` (1), `hopeless` (0) or `either`."""
        rng = np.random.default_rng(seed)
        p = [rng.dirichlet(np.ones(V), V**k) for k in range(G + 1)]
        q = [rng.dirichlet(2 * np.ones(V), V**k) for k in range(G + 1)]
        shapes = [V**k for k in range(G)]
        said = {
            "true": lambda k, n: np.minimum(p[k], q[k]).sum(axis=1),
            "wrong": lambda k, n: rng.random(n),
            "certain": lambda k, n: np.ones(n),
            "hopeless": lambda k, n: np.zeros(n),
            "either": lambda k, n: rng.choice([0.0, 0.5, 1.0], n),
        }[kind]
        return cls(p, q, [said(k, n) for k, n in enumerate(shapes)])

    @property
    def drawn(self) -> np.ndarray:
        """[V ** G] probability of every block."""
        return np.prod([self._along(self.q, k, strings(G)) for k in range(G)], axis=0)

    @property
    def survival(self) -> np.ndarray:
        """[V ** G, G] of every block."""
        columns = [self.confidence[k][_number(strings(G)[:, :k])] for k in range(G)]
        return np.cumprod(np.stack(columns, axis=1), axis=1)

    @property
    def law(self) -> np.ndarray:
        """[V ** (G + 1)] the target's own."""
        return np.prod([self._along(self.p, k, strings(G + 1)) for k in range(G + 1)], axis=0)

    def emitted(self) -> np.ndarray:
        """[V ** G blocks, G + 1 lengths, V ** (G + 1)] law of the output given the block and how much is verified."""
        out = np.zeros((V**G, G + 1, V ** (G + 1)))
        for block, length in itertools.product(range(V**G), range(G + 1)):
            x, alive = strings(G)[block], 1.0
            for k in range(length):
                p, q = (dist[k][_number(x[None, :k])[0]] for dist in (self.p, self.q))
                accept = min(1.0, p[x[k]] / q[x[k]])
                residual = np.maximum(p - q, 0)
                if accept < 1:
                    out[block, length] += alive * (1 - accept) * self._after(x[:k], residual / residual.sum())
                alive *= accept
            out[block, length] += alive * self._after(x[:length], self.p[length][_number(x[None, :length])[0]])
        return out

    def _after(self, prefix: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Law [V ** (G + 1)] of the output: the prefix, a token of this law, plain decoding."""
        every, k = strings(G + 1), len(prefix)
        law = (every[:, :k] == prefix).all(axis=1) * token[every[:, k]]
        for later in range(k + 1, G + 1):
            law = law * self._along(self.p, later, every)
        return law

    @staticmethod
    def _along(distributions: list[np.ndarray], k: int, tokens: np.ndarray) -> np.ndarray:
        return distributions[k][_number(tokens[:, :k]), tokens[:, k]]


def _number(tokens: np.ndarray) -> np.ndarray:
    return tokens @ V ** np.arange(tokens.shape[1])[::-1]


@functools.lru_cache
def chains(seed: int, kind: str):
    """Of two chains: survival [blocks * blocks, 2, G] and probability [blocks, blocks] of every pair of blocks, the law
    of each one's output given its block and length, and the law that should come out."""
    pair = Chain.random(seed, kind), Chain.random(100 + seed, kind)
    first, second = np.broadcast_arrays(pair[0].survival[:, None], pair[1].survival[None])
    survival = np.stack([first, second], axis=2).reshape(-1, 2, G).astype(np.float32)
    drawn, law = (np.outer(getattr(pair[0], x), getattr(pair[1], x)) for x in ("drawn", "law"))
    return survival, drawn, [chain.emitted() for chain in pair], law


@functools.partial(jax.jit, static_argnames="policy")
def lengths_of(policy: Policy, survival, round: Round, state):
    return jax.vmap(policy.lengths, in_axes=(0, None, None))(survival, round, state)


def joint_law(policy: Policy, case, round: Round, state) -> tuple[np.ndarray, np.ndarray]:
    """Joint law of the outputs of two requests over one round, and the lengths [blocks, blocks, 2] it comes from."""
    survival, drawn, emitted, _ = case
    lengths = np.asarray(lengths_of(policy, survival, round, state)).reshape(V**G, V**G, 2)
    blocks = np.arange(V**G)
    given = emitted[0][blocks[:, None], lengths[..., 0]], emitted[1][blocks[None], lengths[..., 1]]
    return np.einsum("xy,xyi,xyj->ij", drawn, *given, optimize=True), lengths


def deviation(policy: Policy, case, round: Round, state=()) -> float:
    """Largest error of the joint law."""
    return float(np.abs(joint_law(policy, case, round, state)[0] - case[3]).max())


SMOOTH = StepCosts.from_steps_per_second({n: 1 / (3 + n) for n in range(1, 9)})
JAGGED = StepCosts((Stairs(2, (2, 3, 5, 8), (3.0, 3.6, 4.4, 5.0), 0.5),))
POLICIES: list[Policy] = [
    Fixed(),
    Fixed(1),
    Plain(),
    Threshold(0.3),
    Threshold(0.7),
    EarlyStop(SMOOTH),
    EarlyStop(JAGGED),
    EarlyStop(JAGGED, minimum_gain=0.04),
    EarlyStop(SMOOTH, floor=1),
    EarlyStop(SMOOTH.with_promise(0.15, 0.1)),
    LaggedCapacity(SMOOTH),
    LaggedCapacity(JAGGED),
    LaggedCapacity(JAGGED, minimum_gain=0.04, floor=1),
    LaggedCapacity(SMOOTH, memory=0.5, prior=0.5),
    Gate(EarlyStop(JAGGED), JAGGED),
    Gate(LaggedCapacity(SMOOTH), SMOOTH),
]
KINDS = ("true", "wrong", "certain", "hopeless", "either")


def states(policy: Policy, round: Round):
    """Before anything was known, and after rounds of all sorts."""
    rng = np.random.default_rng(0)
    state = policy.initial_state(2, G)
    yield state
    for step in range(4 if jax.tree.leaves(state) else 0):
        survival = jnp.asarray(np.cumprod(rng.random((2, G)), axis=1), jnp.float32)
        accepted = jnp.asarray(rng.integers(0, 3, 2))
        outcome = None if step == 1 else Outcome(survival, accepted + 1, accepted)
        state = policy.update(state, round, outcome)
        yield state


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{type(p).__name__}{POLICIES.index(p)}")
def test_two_requests_keep_their_law_and_stay_independent(policy, padded):
    depends = False
    for room in ([3, 3], [3, 1]):
        round = Round(jnp.ones(2, bool), jnp.array(room), padded)
        for state in states(policy, round):
            for seed, kind in enumerate(KINDS):
                law, lengths = joint_law(policy, chains(seed, kind), round, state)
                np.testing.assert_allclose(law, chains(seed, kind)[3], rtol=0, atol=EXACT)
                depends |= len(np.unique(lengths.reshape(-1, 2), axis=0)) > 1
    assert depends or isinstance(policy, Fixed | Plain | LaggedCapacity | Gate), "lengths should depend on the drafts"


@dataclasses.dataclass(frozen=True)
class GivenBack(EarlyStop):
    """Early stop that verifies nothing if the whole gain turns out small: it has seen what was drawn by then."""

    def lengths(self, survival, round, state=()):
        candidates = self.pool(survival, round)
        m = candidates.early_stop()
        return candidates.lengths(jnp.where(candidates.theta[m] > 1.3 * candidates.theta[0], m, 0))


@dataclasses.dataclass(frozen=True)
class EachOther(Policy):
    """Each request verifies its draft if the other's drew well: every single law is right, the joint law is not."""

    def lengths(self, survival, round, state=()):
        return (survival[::-1, 1] > 0.5 * survival[::-1, 0]).astype(jnp.int32)

    def widths(self, rows, block_size):
        return (block_size + 1,)


TRAP = StepCosts((Stairs(2, (2, 8), (3.0, 6.0)),))
BOTH = Round(jnp.ones(2, bool), jnp.full(2, G))


@pytest.mark.parametrize("policy", [Oracle(TRAP), GivenBack(SMOOTH), EachOther()], ids=lambda p: type(p).__name__)
def test_what_looks_ahead_fails(policy):
    assert max(deviation(policy, chains(seed, "wrong"), BOTH) for seed in range(8)) > 1e-3


def test_requests_that_see_each_other_have_the_right_law_each():
    for seed in range(4):
        law, exact = joint_law(EachOther(), chains(seed, "wrong"), BOTH, ())[0], chains(seed, "wrong")[3]
        for axis in (0, 1):
            np.testing.assert_allclose(law.sum(axis=axis), exact.sum(axis=axis), rtol=0, atol=EXACT)


def test_retrospective_search_gives_085_on_the_counterexample():
    """P(A) is 0.7. Verifying A's block whole and B's not at all gives 0.85, as in the paper."""
    costs = StepCosts.from_steps_per_second({1: 1.0, 2: 0.5, 3: 0.45})
    survival = jnp.array([[0.8, 0.8 * 0.9], [0.8, 0.0]])
    round = Round(jnp.ones(1, bool), jnp.full(1, 2))
    for policy, expected in ((Oracle(costs), 0.85), (EarlyStop(costs), 0.7), (LaggedCapacity(costs), 0.7)):
        state = policy.initial_state(1, 2)
        verified = (np.asarray(lengths_of(policy, survival[:, None], round, state)) > 0).ravel()
        # Both tokens are drafted with 0.5: A is accepted, and B with 0.3 / 0.5, its residual being A.
        of_a, of_b = (1.0 if verified[0] else 0.7), (1 - 0.3 / 0.5 if verified[1] else 0.7)
        assert 0.5 * of_a + 0.5 * of_b == pytest.approx(expected, abs=1e-12)


class Walk:
    """All ways one request can go over several rounds, with the policy's memory carried along."""

    tokens: ClassVar[int] = 4

    def __init__(self, policy: Policy, seed: int):
        rng = np.random.default_rng(seed)
        self.policy = policy
        depth = self.tokens + G
        self.p = [rng.dirichlet(np.ones(V), V**k) for k in range(depth + 1)]
        self.q = [rng.dirichlet(2 * np.ones(V), V**k) for k in range(depth + 1)]
        self.c = [rng.choice([0.1, 0.5, 0.9, 1.0], V**k) for k in range(depth + 1)]
        self.law = np.zeros(V**self.tokens)
        self.lengths = set()
        self.round = Round(jnp.ones(1, bool), jnp.full(1, 2))
        self._ask = jax.jit(lambda s, state: (policy.drafts(self.round, state), policy.lengths(s, self.round, state)))
        self._tell = jax.jit(lambda state, outcome: policy.update(state, self.round, outcome))

    def run(self, prefix: tuple[int, ...] = (), weight: float = 1.0, state=None):
        state = self.policy.initial_state(1, 2) if state is None else state
        if len(prefix) >= self.tokens:
            self.law[_number(np.array([prefix[: self.tokens]]))[0]] += weight
            return
        for block in itertools.product(range(V), repeat=2):
            drawn = weight * np.prod([self.at(self.q, prefix, block[:k])[block[k]] for k in range(2)])
            survival = jnp.array([np.cumprod([self.at(self.c, prefix, block[:k]) for k in range(2)])], jnp.float32)
            drafts, lengths = jax.device_get(self._ask(survival, state))
            length = int(lengths[0]) if drafts else 0
            self.lengths.add((bool(drafts), length))
            for accepted, token, share in self.ends(prefix, block, length):
                outcome = Outcome(survival, jnp.array([length]), jnp.array([accepted])) if drafts else None
                self.run((*prefix, *block[:accepted], token), drawn * share, self._tell(state, outcome))

    def ends(self, prefix: tuple[int, ...], block: tuple[int, ...], length: int):
        """(accepted, next token, probability) of everything that can come of a block."""
        alive = 1.0
        for k in range(length):
            p, q = self.at(self.p, prefix, block[:k]), self.at(self.q, prefix, block[:k])
            accept, residual = min(1.0, p[block[k]] / q[block[k]]), np.maximum(p - q, 0)
            yield from ((k, v, alive * (1 - accept) * residual[v] / residual.sum()) for v in range(V) if accept < 1)
            alive *= accept
        yield from ((length, v, alive * self.at(self.p, prefix, block[:length])[v]) for v in range(V))

    @staticmethod
    def at(table: list[np.ndarray], prefix: tuple[int, ...], more: tuple[int, ...]):
        """The entry of a string."""
        return table[len(prefix) + len(more)][_number(np.array([[*prefix, *more]], int))[0]]

    @property
    def target(self) -> np.ndarray:
        every = strings(self.tokens)
        return np.prod([self.p[k][_number(every[:, :k]), every[:, k]] for k in range(self.tokens)], axis=0)


COSTLY = StepCosts((Stairs(1, (1, 2, 3), (1.0, 1.5, 1.6), 0.2),))


@pytest.mark.parametrize(
    "policy",
    [LaggedCapacity(COSTLY), Gate(LaggedCapacity(COSTLY, memory=0.5), COSTLY), Gate(EarlyStop(COSTLY), COSTLY)],
    ids=lambda p: f"{type(p).__name__}-{type(getattr(p, 'policy', p)).__name__}",
)
def test_memory_carried_over_rounds_keeps_the_law(policy):
    walk = Walk(policy, 3)
    walk.run()
    np.testing.assert_allclose(walk.law, walk.target, rtol=0, atol=EXACT)
    assert len(walk.lengths) > 1, "what the policy does should depend on what it remembers"
