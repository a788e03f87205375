"""Accepted length of a drafter on prompts, with intervals."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dspark_jax.decoding.generate import Batch, Generation, Generator, Request


def read_prompts(path: str | Path, limit: int | None = None) -> list[str]:
    """First user turns of a JSONL file of {"turns": [text, ...]} rows.

    Raises:
      FileNotFoundError: no such file; ValueError: a row of another form.
    """
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            turns = json.loads(line)["turns"]
            if not (isinstance(turns, list) and isinstance(turns[0], str)):
                raise TypeError(f"turns is {turns!r:.40}")
            prompts.append(turns[0])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f'{path}:{number} is not {{"turns": [text, ...]}} ({error}).') from error
    return prompts[:limit]


def generate_many(
    generator: Generator, requests: Sequence[Request], *, rows: int, slots: int, rounds: int = 8
) -> Iterator[tuple[int, Generation]]:
    """Generates for any number of requests, `rows` at a time; rows that end are refilled every `rounds` rounds.

    Yields:
      (index, generation) in the order they end.

    Raises:
      ValueError: no row, no request, or one that `Generator.generate` would refuse.
    """
    if rows < 1:
        raise ValueError(f"rows must be 1 or more, got {rows}.")
    batch = Batch(generator, min(rows, len(requests)), slots)
    waiting, where = list(enumerate(requests))[::-1], {}
    while waiting or where:
        free = [r for r in range(min(rows, len(requests))) if r not in where]
        if admitted := {row: waiting.pop() for row in free[: len(waiting)]}:
            where |= {row: index for row, (index, _) in admitted.items()}
            batch.admit({row: request for row, (_, request) in admitted.items()})
        batch.step(rounds)
        for row in [r for r in where if not batch.running[r]]:
            yield where.pop(row), batch.result(row)


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Accepted length over a set of generations.

    Attributes:
      tau: tokens a round, bonus included; low, high: 95 % bootstrap interval over prompts.
      conditional: [g] share of verified drafts accepted at each position, given that all before it were.
      rounds: rounds counted.
    """

    tau: float
    low: float
    high: float
    conditional: np.ndarray
    rounds: int


def acceptance(generations: Sequence[Generation], block_size: int, resamples: int = 2000) -> Acceptance:
    """Summarises generations; positions that were not verified are censored, not counted as rejected.

    Raises:
      ValueError: no generation has a round.
    """
    sums = np.array([g.accept_lengths.sum() for g in generations], float)
    counts = np.array([len(g.accept_lengths) for g in generations], float)
    if not counts.sum():
        raise ValueError("no rounds to measure; expected generations longer than one token.")
    picks = np.random.default_rng(0).integers(len(sums), size=(resamples, len(sums)))
    rounds = counts[picks].sum(1)
    taus = sums[picks].sum(1)[rounds > 0] / rounds[rounds > 0]
    accepted = np.concatenate([g.accepted for g in generations])
    scheduled = np.concatenate([g.scheduled for g in generations])
    k = np.arange(block_size)
    tried = (scheduled[:, None] > k) & (accepted[:, None] >= k)
    good = tried & (accepted[:, None] > k)
    conditional = good.sum(0) / np.maximum(tried.sum(0), 1)
    low, high = np.quantile(taus, [0.025, 0.975])
    return Acceptance(sums.sum() / counts.sum(), low, high, conditional, int(counts.sum()))
