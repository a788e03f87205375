"""Plain Python twins of the policies, one request after another, and random cases for both.

Survival comes in sixteenths and seconds in whole numbers, so that float32 sums are exact and equal Thetas are equal.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.scheduling import Round


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Curve:
    """Step costs as an array [B + 1], so that one program serves every table; drafting costs nothing."""

    table: jax.Array

    def seconds(self, requests, tokens, drafted=True):
        return self.table.at[tokens].get(mode="fill", fill_value=jnp.inf)


@dataclasses.dataclass(frozen=True)
class Case:
    """Random rounds: survival [n, r, g], running [n, r], room [n, r], seconds [n, B + 1] by tokens of the step."""

    survival: np.ndarray
    running: np.ndarray
    room: np.ndarray
    seconds: np.ndarray

    @classmethod
    def random(cls, seed: int, n: int, r: int = 3, g: int = 3) -> "Case":
        rng = np.random.default_rng(seed)
        drops = rng.integers(0, rng.integers(2, 9, (n, 1, 1)), (n, r, g))
        survival = np.maximum(16 - np.cumsum(drops, axis=2), 0) / 16
        stairs = np.cumsum(rng.integers(0, 4, (n, r * (g + 1) + 1)) * rng.integers(0, 2, (n, 1)) + 1, axis=1)
        jagged = np.cumsum((rng.random(stairs.shape) < 0.3) * rng.integers(1, 9, stairs.shape), axis=1) + 4
        seconds = np.where(rng.random((n, 1)) < 0.5, stairs, jagged).astype(np.float32)
        ends = rng.integers(1, stairs.shape[1] + 8, (n, 1))
        seconds = np.where(np.arange(stairs.shape[1]) <= ends, seconds, np.inf)
        running = rng.random((n, r)) < 0.8
        return cls(survival.astype(np.float32), running, rng.integers(0, g + 2, (n, r)), seconds.astype(np.float32))

    def __len__(self) -> int:
        return len(self.survival)

    def round(self, padded: bool) -> Round:
        """Rounds with a leading axis [n], for `jax.vmap`."""
        return Round(jnp.asarray(self.running), jnp.asarray(self.room), padded)


@dataclasses.dataclass(frozen=True)
class Twin:
    """One round, step by step.

    Attributes:
      survival: [r][g]; running, room: [r]; seconds: {tokens: seconds} without tokens that no step holds.
    """

    survival: np.ndarray
    running: np.ndarray
    room: np.ndarray
    seconds: np.ndarray
    padded: bool = False
    floor: int = 0

    @property
    def requests(self) -> int:
        return int(self.running.sum())

    def limit(self, request: int) -> int:
        """Drafts a request could verify."""
        return min(int(self.room[request]), self.survival.shape[1]) if self.running[request] else 0

    def cost(self, lengths) -> float:
        """Seconds of the step, or infinity."""
        r = len(lengths)
        tokens = r * (1 + max(lengths)) if self.padded else self.requests + sum(lengths)
        return float(self.seconds[tokens]) if tokens < len(self.seconds) else np.inf

    def tau(self, lengths) -> float:
        return self.requests + sum(float(self.survival[r, :length].sum()) for r, length in enumerate(lengths))

    def theta(self, lengths) -> np.float32:
        with np.errstate(invalid="ignore"):
            return np.float32(self.tau(lengths)) / np.float32(self.cost(lengths))

    def admissions(self, survival: np.ndarray | None = None) -> list[list[int]]:
        """Lengths after 0, 1, 2, ... admissions, those of the floor first, as far as a step holds them."""
        survival = self.survival if survival is None else survival
        requests = range(len(survival))
        steps = [[0] * len(survival)]
        while True:
            lengths = steps[-1]
            sure = [lengths[i] < min(self.floor, self.limit(i)) for i in requests]
            heads = [i for i in requests if lengths[i] < self.limit(i) and (sure[i] or survival[i, lengths[i]] > 0)]
            if not heads:
                return steps
            if self.padded:
                grown = [min(max(lengths) + 1, self.limit(i)) for i in requests]
            else:
                worth = [2 if sure[i] else survival[i, lengths[i]] if i in heads else -1 for i in requests]
                best = min(heads, key=lambda i: (-worth[i], lengths[i], i))
                grown = [n + (i == best) for i, n in enumerate(lengths)]
            if self.cost(grown) == np.inf:
                return steps
            steps.append(grown)

    def least(self, steps: list[list[int]]) -> int:
        """How many of the admissions the floor asks for."""
        floors = [min(self.floor, self.limit(i)) for i in range(len(self.survival))]
        return min(max(floors) if self.padded else sum(floors), len(steps) - 1)

    def early_stop(self, minimum_gain: float = 0.0) -> list[int]:
        """Algorithm 1 as printed, after the floor."""
        steps = self.admissions()
        best = steps[self.least(steps)]
        for lengths in steps[self.least(steps) + 1 :]:
            factor = np.float32(1 + minimum_gain if self.cost(lengths) > self.cost(best) else 1)
            if not self.theta(lengths) > self.theta(best) * factor:
                break
            best = lengths
        return best

    def search(self, minimum_gain: float = 0.0) -> int:
        """Admissions with the largest Theta of all, the fewest of equals."""
        steps = self.admissions()
        least, thetas = self.least(steps), [self.theta(lengths) for lengths in steps]
        best = max(range(least, len(steps)), key=lambda m: (thetas[m], -m))
        return best if thetas[best] >= np.float32(1 + minimum_gain) * thetas[least] else least

    def lagged(self, expected: np.ndarray, minimum_gain: float = 0.0) -> list[int]:
        """Capacity by the expected survival, to the end of its bucket; who fills it, by the round's own."""
        r, g = expected.shape
        past = dataclasses.replace(self, survival=expected)
        m = past.search(minimum_gain)
        price = self.cost(past.admissions()[m])
        sizes = [[n] * r for n in range(g + 1)] if self.padded else [[n] + [0] * (r - 1) for n in range(r * g + 1)]
        capacity = max([n for n, lengths in enumerate(sizes) if self.cost(lengths) <= price], default=m)
        steps = self.admissions()
        return steps[min(max(capacity, m), len(steps) - 1)]


def brute_force(case: Case) -> np.ndarray:
    """The largest Theta [n] over all lengths, packed."""
    n, r, g = case.survival.shape
    lengths = np.array(list(itertools.product(range(g + 1), repeat=r)))
    worth = np.concatenate([np.zeros((n, r, 1)), np.cumsum(case.survival, axis=2)], axis=2)
    requests = case.running.sum(axis=1)[:, None]
    tau = requests + sum(worth[:, i, lengths[:, i]] for i in range(r))
    tokens = requests + lengths.sum(axis=1)
    limit = np.where(case.running, np.minimum(case.room, g), 0)
    allowed = (lengths <= limit[:, None]).all(axis=2)
    theta = tau.astype(np.float32) / np.take_along_axis(case.seconds, tokens, axis=1)
    return np.where(allowed, theta, 0).max(axis=1)
