"""Drift: what a scaling fitted on one mix of domains does on another."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from dspark_jax.calibration.calibration import ALL
from dspark_jax.calibration.metrics import BINS, measure
from dspark_jax.calibration.records import Records
from dspark_jax.calibration.scaling import MINIMUM, Objective, fit_scaling
from dspark_jax.calibration.survival import Scaling, to_survival_twin

NONE = "no fit"

MOST_SHORT = 0.2
"""Share of rounds that may be shorter than a block, as the last ones of answers are."""


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """What verification costs and who decides, to put a price on wrong probabilities.

    Attributes:
      lengths: survival [r, g] -> verify lengths [r].
      steps_per_second: [B + 1] SPS(B) by tokens in a verification, anchors included, up to requests * (1 + g).
      requests: r, decoded side by side.
    """

    lengths: Callable[[np.ndarray], np.ndarray]
    steps_per_second: np.ndarray
    requests: int


@dataclasses.dataclass(frozen=True)
class Drift:
    """The scaling of every mix measured on every domain, always on prompts that no mix was fitted on.

    Attributes:
      fitted_on: [m] names of the mixes: none (raw confidences), each domain alone, all but each, all of them.
      measured_on: [n] domains.
      scalings: [m], None for raw confidences.
      ece: [m, n] mean ECE of survival over the draft positions.
      throughput: [m, n] tokens a second with the scheduler, None without one.
    """

    fitted_on: tuple[str, ...]
    measured_on: tuple[str, ...]
    scalings: tuple[Scaling | None, ...]
    ece: np.ndarray
    throughput: np.ndarray | None = None

    @property
    def loss(self) -> np.ndarray | None:
        """[m, n] share of a domain's throughput lost against a scaling fitted on that domain itself."""
        if self.throughput is None:
            return None
        home = [self.throughput[self.fitted_on.index(name), i] for i, name in enumerate(self.measured_on)]
        return 1 - self.throughput / np.array(home)


def measure_drift(
    records: Records,
    *,
    shifts: bool = True,
    objective: Objective = "ece",
    held_out: float = 0.5,
    seed: int = 0,
    bins: int = BINS,
    minimum: int = MINIMUM,
    scheduler: Scheduler | None = None,
) -> Drift:
    """Fits on every mix and measures on every domain.

    Args:
      scheduler: also measures throughput; records must then be of whole blocks, see `throughput`.

    Raises:
      ValueError: fewer than two domains, or too few prompts to split.
    """
    names = records.domains
    if len(names) < 2:
        raise ValueError(f"drift needs records of at least two domains, got {', '.join(names)}.")
    fitted, measured = records.split(held_out, seed)
    mixes: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
    if len(names) > 2:
        mixes |= {f"all but {name}": tuple(n for n in names if n != name) for name in names}
    mixes[ALL] = names
    options: dict[str, Any] = {"shifts": shifts, "objective": objective, "bins": bins, "minimum": minimum}
    scalings = {NONE: None} | {m: fit_scaling(fitted.of_domain(*p), **options).scaling for m, p in mixes.items()}
    parts = [measured.of_domain(name) for name in names]
    ece = [[measure(part, s, bins).mean_ece for part in parts] for s in scalings.values()]
    rates = None
    if scheduler is not None:
        rates = np.array([[throughput(part, s, scheduler, seed) for part in parts] for s in scalings.values()])
    return Drift(tuple(scalings), names, tuple(scalings.values()), np.array(ece), rates)


def throughput(records: Records, scaling: Scaling | None, scheduler: Scheduler, seed: int = 0) -> float:
    """Tokens a second if the recorded rounds ran `requests` at a time and were trimmed by survival under a scaling.

    Rounds are paired at random, the same way for all scalings. They must have been recorded with whole blocks
    verified: only then is it known what a shorter or longer prefix would have given.

    Raises:
      ValueError: rounds were trimmed when recorded, are fewer than requests, or steps_per_second is too short.
    """
    r, g = scheduler.requests, records.block_size
    if (short := np.mean(records.scheduled < g)) > MOST_SHORT:
        raise ValueError(
            f"{short:.0%} of the rounds verified less than the whole block of {g}, so nobody knows what the rest would "
            "have given; record without --costs and --survival."
        )
    if len(records) < r:
        raise ValueError(f"{len(records)} rounds are too few for {r} requests side by side; record more.")
    if len(scheduler.steps_per_second) <= r * (1 + g):
        raise ValueError(
            f"steps_per_second must reach {r * (1 + g)} tokens, {r} requests of {1 + g}; it ends at "
            f"{len(scheduler.steps_per_second) - 1}."
        )
    batches = np.random.default_rng(seed).permutation(len(records))[: len(records) // r * r].reshape(-1, r)
    survival = to_survival_twin(records.confidence_logits, scaling)
    tokens = seconds = 0.0
    for rows in batches:
        lengths = np.asarray(scheduler.lengths(survival[rows]))
        tokens += float(r + np.minimum(records.accepted[rows], lengths).sum())
        seconds += 1 / float(scheduler.steps_per_second[r + int(lengths.sum())])
    return tokens / seconds
