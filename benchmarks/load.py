"""Load on an OpenAI-compatible server, and what its users see of it."""

import asyncio
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx2
import numpy as np


@dataclasses.dataclass(frozen=True)
class Answer:
    """A streamed answer; times in seconds since the load began.

    Attributes:
      start, end: when it was asked for, and over.
      times: when text came, a delta each; several tokens may come in one.
      usage: as the server tells it.
      error: why there is no whole answer.
    """

    start: float
    end: float
    times: tuple[float, ...] = ()
    usage: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None

    @property
    def tokens(self) -> int:
        """As the server counts; deltas if it does not."""
        return self.usage.get("completion_tokens", len(self.times))


@dataclasses.dataclass(frozen=True)
class Load:
    """Answers, and until when the load was whole: while there was more to ask for."""

    answers: Sequence[Answer]
    until: float


@dataclasses.dataclass(frozen=True)
class Summary:
    """A load in numbers; nan where nothing tells them.

    Attributes:
      throughput: tokens/s of all users, while the load was whole; an answer's tokens count as evenly over its deltas.
      user_speed: tokens/s of a request from its start to its end, the mean over requests.
      ttft: seconds to the first text, median and 95th percentile.
      gap: seconds between deltas of an answer, median, 95th percentile and longest.
      accept_length: tokens a round, bonus included; budget: tokens verified a round of a request, its anchor included.
      errors: requests without a whole answer; they count in nothing else.
    """

    throughput: float
    user_speed: float
    ttft_p50: float
    ttft_p95: float
    gap_p50: float
    gap_p95: float
    gap_max: float
    accept_length: float
    budget: float
    errors: float

    @classmethod
    def of(cls, load: Load) -> "Summary":
        """Summarises a load."""
        whole = [a for a in load.answers if a.error is None and a.times]
        came = sum(a.tokens * sum(t <= load.until for t in a.times) / len(a.times) for a in whole)
        first = [a.times[0] - a.start for a in whole]
        gaps = np.concatenate([np.diff(a.times) for a in whole] or [[]])
        rounds, verified, accepted = (
            sum(a.usage.get(name) or 0 for a in whole) for name in ("rounds", "verified_tokens", "accepted_tokens")
        )
        nan = float("nan")
        return cls(
            throughput=came / load.until if came else nan,
            user_speed=statistics.mean(a.tokens / (a.end - a.start) for a in whole) if whole else nan,
            ttft_p50=quantile(first, 0.5),
            ttft_p95=quantile(first, 0.95),
            gap_p50=quantile(gaps, 0.5),
            gap_p95=quantile(gaps, 0.95),
            gap_max=quantile(gaps, 1),
            accept_length=1 + accepted / rounds if rounds else nan,
            budget=1 + verified / rounds if rounds else nan,
            errors=len(load.answers) - len(whole),
        )

    @classmethod
    def median(cls, summaries: Sequence["Summary"]) -> "Summary":
        """The median of each number."""
        return cls(*np.median([dataclasses.astuple(s) for s in summaries], axis=0).tolist())


def quantile(values: Sequence[float] | np.ndarray, q: float) -> float:
    """The q-quantile; nan of nothing."""
    return float(np.quantile(values, q)) if len(values) else float("nan")


async def ask(client: httpx2.AsyncClient, body: dict[str, Any], clock: Callable[[], float]) -> Answer:
    """Streams one chat completion; what goes wrong is in the answer."""
    start, times, usage, error = clock(), [], {}, "the stream ended without [DONE]"
    try:
        async with client.sse("chat/completions", method="POST", json=body) as events:
            if events.response.is_error:
                text = (await events.response.aread()).decode(errors="replace")
                return Answer(start, clock(), error=f"{events.response.status_code}: {text:.300}")
            async for event in events:
                if event.data == "[DONE]":
                    error = None
                    continue
                chunk = json.loads(event.data)
                if "error" in chunk:
                    error = str(chunk["error"])
                    break
                usage = chunk.get("usage") or usage
                if any(choice["delta"].get("content") for choice in chunk["choices"]):
                    times.append(clock())
    except (httpx2.HTTPError, ValueError, KeyError) as failure:
        error = repr(failure)
    return Answer(start, clock(), tuple(times), usage, error)


async def closed_loop(client: httpx2.AsyncClient, bodies: Sequence[dict[str, Any]], users: int) -> Load:
    """So many users, each asking for the next as soon as it has its answer; whole until one finds nothing to ask for.

    Raises:
      ValueError: fewer requests than users.
    """
    if len(bodies) < users:
        raise ValueError(f"expected a request or more a user, got {len(bodies)} requests for {users} users.")
    clock, answers, ends, waiting = stopwatch(), [], [], iter(bodies)

    async def user() -> None:
        for body in waiting:
            answers.append(await ask(client, body, clock))
        ends.append(clock())

    await asyncio.gather(*(user() for _ in range(users)))
    return Load(answers, min(ends))


async def open_loop(client: httpx2.AsyncClient, bodies: Sequence[dict[str, Any]], rate: float, seed: int) -> Load:
    """Requests at random times, `rate` a second on average, however busy the server is; whole until the last comes."""
    clock, when = stopwatch(), arrivals(rate, len(bodies), seed)

    async def one(body: dict[str, Any], at: float) -> Answer:
        await asyncio.sleep(at - clock())
        return await ask(client, body, clock)

    return Load(await asyncio.gather(*map(one, bodies, when)), when[-1])


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds of a Poisson process of `rate` a second, the same for the same seed."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count)).tolist()


def stopwatch() -> Callable[[], float]:
    """Seconds since now."""
    start = time.perf_counter()
    return lambda: time.perf_counter() - start
