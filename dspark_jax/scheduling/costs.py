"""What a step costs: seconds by requests and tokens, measured on the machine that runs them, kept as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.json_file import read_json
from dspark_jax.whole_file import whole_file


@dataclass(frozen=True)
class Stairs:
    """Measured steps of up to `requests` requests.

    A step runs in the smallest compiled bucket that holds its tokens, so its cost is a staircase of the token count.

    Attributes:
      tokens: sizes of the buckets, ascending; a step of more tokens cannot run.
      verify_seconds: of one step of each bucket.
      draft_seconds: of drafting one block for every request.

    Raises:
      ValueError: no bucket, sizes that do not ascend, or seconds that are no positive numbers.
    """

    requests: int
    tokens: tuple[int, ...]
    verify_seconds: tuple[float, ...]
    draft_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.verify_seconds):
            raise ValueError(
                f"expected one time for each of one or more buckets, got {len(self.tokens)} buckets and "
                f"{len(self.verify_seconds)} times; measure again with `dspark profile`."
            )
        if self.requests < 1 or self.tokens[0] < 1 or any(b <= a for a, b in pairwise(self.tokens)):
            raise ValueError(f"requests and buckets must be positive and ascend, got {self.requests}, {self.tokens}.")
        if not all(isfinite(s) and s > 0 for s in self.verify_seconds):
            raise ValueError(f"seconds of a step must be positive and finite, got {self.verify_seconds}.")
        if not (isfinite(self.draft_seconds) and self.draft_seconds >= 0):
            raise ValueError(f"draft_seconds must be 0 or more and finite, got {self.draft_seconds}.")

    @cached_property
    def by_tokens(self) -> np.ndarray:
        """Seconds [last + 1] of a step of every token count. A bucket dearer than a larger one is never used."""
        cheapest = np.minimum.accumulate(np.array(self.verify_seconds)[::-1])[::-1]
        return cheapest[np.searchsorted(self.tokens, np.arange(self.tokens[-1] + 1))]

    @property
    def useful(self) -> list[int]:
        """Buckets that no larger one outruns."""
        return [n for n, own in zip(self.tokens, self.verify_seconds, strict=True) if own <= self.by_tokens[n]]


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step of any number of requests and tokens. Hashable, so that a compiled program belongs to it.

    Attributes:
      stairs: one staircase for each measured number of requests, ascending; a number between takes the next one.
      user_speed: tokens/s that every user should see (0: no such promise). A user gets at least one token a step, so
        steps of at most 1 / user_speed seconds keep the promise; `price` seconds are charged for each second beyond.

    Raises:
      ValueError: no staircase, numbers of requests that do not ascend, or a negative speed or price.
    """

    stairs: tuple[Stairs, ...]
    user_speed: float = 0.0
    price: float = 0.0

    def __post_init__(self) -> None:
        if not self.stairs:
            raise ValueError("the cost table is empty; measure one with `dspark profile`.")
        requests = [s.requests for s in self.stairs]
        if any(b <= a for a, b in pairwise(requests)):
            raise ValueError(f"numbers of requests must ascend, got {requests}.")
        if self.user_speed < 0 or self.price < 0:
            raise ValueError(f"user_speed and price must be 0 or more, got {self.user_speed} and {self.price}.")

    @classmethod
    def from_steps_per_second(cls, sps: Mapping[int, float], draft_seconds: float = 0.0) -> "StepCosts":
        """The table SPS(B), B ascending, for any number of requests."""
        tokens = tuple(sps)
        return cls((Stairs(max(tokens, default=1), tokens, tuple(1 / s for s in sps.values()), draft_seconds),))

    def with_promise(self, user_speed: float, price: float) -> "StepCosts":
        """The same costs with a price on steps too long for a user promised `user_speed` tokens/s."""
        return replace(self, user_speed=user_speed, price=price)

    @property
    def max_requests(self) -> int:
        return self.stairs[-1].requests

    @property
    def max_tokens(self) -> int:
        return max(s.tokens[-1] for s in self.stairs)

    @cached_property
    def _steps(self) -> dict[bool, np.ndarray]:
        """Seconds [stairs, max_tokens + 1] of drafted and plain steps, infinite where no bucket is large enough."""
        table = np.full((len(self.stairs), self.max_tokens + 1), inf)
        for row, stairs in zip(table, self.stairs, strict=True):
            row[: len(stairs.by_tokens)] = stairs.by_tokens
        draft = np.array([[s.draft_seconds] for s in self.stairs])
        return {drafted: self._charged(table + drafted * draft).astype(np.float32) for drafted in (True, False)}

    def _charged(self, seconds: np.ndarray) -> np.ndarray:
        if not (self.user_speed and self.price):
            return seconds
        return seconds + self.price * np.maximum(seconds - 1 / self.user_speed, 0)

    def seconds(self, requests: jax.Array | int, tokens: jax.Array, drafted: bool = True) -> jax.Array:
        """Seconds of steps of `tokens` [...] (anchors included) for `requests`, drafting included unless `drafted` is
        False; infinite where the table has no such step."""
        row = jnp.searchsorted(jnp.array([s.requests for s in self.stairs]), requests)
        return jnp.asarray(self._steps[drafted]).at[row, tokens].get(mode="fill", fill_value=inf)

    def widths(self, rows: int, block_size: int) -> tuple[int, ...]:
        """Token counts a row worth compiling for a rectangle of `rows` rows: those where the next one costs more.

        Raises:
          ValueError: the table does not reach `rows` requests of one token.
        """
        fitting = [s for s in self.stairs if s.requests >= rows]
        tokens = rows * np.arange(1, block_size + 2)
        seconds = fitting[0].by_tokens[tokens[tokens <= fitting[0].tokens[-1]]] if fitting else np.zeros(0)
        last = len(seconds)
        if not last:
            raise ValueError(
                f"the cost table covers steps of up to {self.max_requests} requests and {self.max_tokens} tokens, got "
                f"a batch of {rows} rows. Measure it with `dspark profile --rows {rows}`, or run fewer rows at a time."
            )
        return tuple(w for w in range(1, last + 1) if w == last or seconds[w] > seconds[w - 1])


@dataclass(frozen=True)
class CostTable:
    """Step costs at several context lengths, and where they were measured.

    Attributes:
      contexts: (positions a row, costs) pairs, ascending.
      environment: what the costs hold for, or None in a file that does not say.
    """

    contexts: tuple[tuple[int, StepCosts], ...]
    environment: Mapping[str, str] | None = None

    def at(self, context: int | None = None) -> StepCosts:
        """Costs at the next measured context length (None: the longest).

        Raises:
          ValueError: `context` is longer than every measured one.
        """
        if context is None:
            return self.contexts[-1][1]
        for measured, costs in self.contexts:
            if context <= measured:
                return costs
        raise ValueError(
            f"the cost table covers contexts of up to {self.contexts[-1][0]} positions, got {context}. "
            f"Measure it with `dspark profile --contexts {context}`."
        )

    def check(self, environment: Mapping[str, str]) -> "CostTable":
        """Itself, if it was measured in this environment.

        Raises:
          ValueError: it was not, or does not say where it was.
        """
        if self.environment is None:
            raise ValueError(
                "the cost table does not say where it was measured; run `dspark profile` here, or load it without an "
                "environment to vouch for it yourself."
            )
        names = sorted({*environment, *self.environment})
        wrong = [
            f"{name} {self.environment.get(name, 'unknown')!r}, here {environment.get(name, 'unknown')!r}"
            for name in names
            if self.environment.get(name) != environment.get(name)
        ]
        if wrong:
            raise ValueError(
                f"the cost table was measured elsewhere: {'; '.join(wrong)}. Measure it here with `dspark profile`; "
                "for a server, start it with --costs and a new file."
            )
        return self

    def save(self, path: str | Path) -> None:
        """Writes JSON, whole or not at all, that servers which know one curve of steps per second read as well."""
        sizes = sorted({n for _, costs in self.contexts for s in costs.stairs for n in s.tokens})
        starts = [1, *(n + 1 for n in sizes[:-1])]
        data = {
            "sample_batch_tokens": starts,
            "sample_steps_per_sec": [1 / self._dearest(n) for n in sizes],
            "max_batch_tokens": sizes[-1],
            "environment": None if self.environment is None else dict(self.environment),
            "contexts": [
                {
                    "context": context,
                    "stairs": [
                        {
                            "requests": s.requests,
                            "tokens": s.tokens,
                            "verify_seconds": s.verify_seconds,
                            "draft_seconds": s.draft_seconds,
                        }
                        for s in costs.stairs
                    ],
                }
                for context, costs in self.contexts
            ],
        }
        with whole_file(path) as work:
            work.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    def _dearest(self, tokens: int) -> float:
        """Most seconds a step of this many tokens takes, at the longest context."""
        stairs = [s for s in self.at().stairs if s.tokens[-1] >= tokens]
        possible = [s for s in stairs if s.requests <= tokens] or stairs
        return max(float(s.by_tokens[tokens]) + s.draft_seconds for s in possible)


def load_costs(path: str | Path, environment: Mapping[str, str] | None = None) -> CostTable:
    """Reads a cost table: what `CostTable.save` writes, or either form of SGLang's (steps per second of sampled token
    counts, or a sum of terms interpolated over requests and tokens).

    Args:
      environment: of the models about to run, see `dspark_jax.scheduling.profile.environment`; None vouches for the
        file.

    Raises:
      FileNotFoundError: no such file; ValueError: no such form, a broken table, or another environment.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; write a cost table with `dspark profile --out {path}`.")
    data = read_json(path)
    readers = {
        "contexts": _read_contexts,
        "sample_steps_per_sec": _read_samples,
        "bias_seconds": _read_sum,
    }
    found = [read for name, read in readers.items() if name in data]
    if not found:
        raise ValueError(f"{path} is no cost table: expected one of {', '.join(readers)}, got {sorted(data)}.")
    try:
        table = found[0](data)
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}; measure again with `dspark profile`.") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {error}") from error
    return table if environment is None else table.check(environment)


def _read_contexts(data: dict[str, Any]) -> CostTable:
    contexts = tuple(
        (int(c["context"]), StepCosts(tuple(
            Stairs(int(s["requests"]), _ints(s["tokens"]), _floats(s["verify_seconds"]), float(s["draft_seconds"]))
            for s in c["stairs"]
        )))
        for c in data["contexts"]
    )  # fmt: skip
    lengths = [context for context, _ in contexts]
    if not lengths or any(b <= a for a, b in pairwise(lengths)):
        raise ValueError(f"expected one or more contexts, ascending, got {lengths}.")
    environment = data.get("environment")
    if not isinstance(environment, dict | None):
        raise ValueError(f"environment must be an object or null, got {environment!r}.")
    return CostTable(contexts, environment)


def _read_samples(data: dict[str, Any]) -> CostTable:
    """A count of tokens costs what the largest sample not above it does (the smallest sample, below all)."""
    starts, sps = _ints(data["sample_batch_tokens"]), _floats(data["sample_steps_per_sec"])
    last = int(data["max_batch_tokens"])
    if not starts or last < starts[-1]:
        raise ValueError(f"expected samples of up to max_batch_tokens {last}, got {list(starts)}.")
    if not all(s > 0 for s in sps):
        raise ValueError(f"steps per second must be positive, got {list(sps)}.")
    ends = (*(n - 1 for n in starts[1:]), last)
    return _anywhere(StepCosts((Stairs(last, ends, tuple(1 / s for s in sps)),)))


def _read_sum(data: dict[str, Any]) -> CostTable:
    """T = bias + alpha(requests) + theta(tokens): theta linear between probes and flat below the first, alpha that of
    the next probe; beyond the last ones the table ends."""
    requests, sizes = _ints(data["bs_probes"]), _ints(data["m_probes"])
    if not sizes or sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
        raise ValueError(f"m_probes must be positive and ascending, got {list(sizes)}.")
    alpha, theta = _floats(data["alpha_seconds"]), _floats(data["theta_seconds"])
    tokens = tuple(range(1, sizes[-1] + 1))
    body = float(data["bias_seconds"]) + np.interp(tokens, sizes, theta)
    return _anywhere(StepCosts(tuple(
        Stairs(n, tokens, tuple((body + a).tolist())) for n, a in zip(requests, alpha, strict=True)
    )))  # fmt: skip


def _anywhere(costs: StepCosts) -> CostTable:
    """A table without context lengths or environment."""
    return CostTable(((np.iinfo(np.int32).max, costs),))


def _ints(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


def _floats(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(float(v) for v in values)
