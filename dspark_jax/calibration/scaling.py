"""Sequential Temperature Scaling: one temperature a draft position, fitted left to right on the cumulative product."""

import dataclasses
from typing import Literal, get_args

import numpy as np

from dspark_jax.calibration.metrics import BINS, expected_calibration_error, log_loss
from dspark_jax.calibration.records import Records
from dspark_jax.calibration.survival import sigmoid

GRID = np.geomspace(0.1, 10, 41)
"""Temperatures tried first; 1 is among them."""

REFINE = 20
"""Steps between two neighbours of the grid in the second search."""

Objective = Literal["ece", "likelihood"]
"""What a temperature minimises: the paper's ECE, or the log loss, which reaches a low ECE with fewer rounds."""

MINIMUM = 100
"""A position with fewer rounds that tested it keeps temperature 1."""


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Fitted temperatures [g], and what to know about positions where the fit says little."""

    temperatures: tuple[float, ...]
    warnings: tuple[str, ...]


def fit_temperatures(
    records: Records, *, objective: Objective = "ece", bins: int = BINS, minimum: int = MINIMUM
) -> Scaling:
    """Fits T_1..T_g: each minimises the ECE of a_k = prod_{i <= k} sigmoid(z_i / T_i), the earlier ones being fixed.

    Only rounds verified up to position k count for T_k. The search is a logarithmic grid, then a finer one around its
    best; between equals the temperature nearest to 1 wins.

    Raises:
      ValueError: no rounds, or an unknown objective.
    """
    if objective not in get_args(Objective):
        raise ValueError(f"objective must be one of {', '.join(get_args(Objective))}, got {objective!r}.")
    if not len(records):
        raise ValueError("no rounds to fit temperatures on.")
    temperatures, warnings = [], []
    before = np.ones(len(records))
    for k in range(records.block_size):
        seen, tested = records.verified[:, k], records.at_risk[:, k]
        z = records.confidence_logits[:, k].astype(np.float64)
        t = 1.0
        if (count := int(tested.sum())) < minimum:
            warnings.append(f"position {k + 1} was tested in {count} rounds, fewer than {minimum}: temperature 1")
        elif not (np.isfinite(z[tested]) & (z[tested] != 0)).any():
            warnings.append(f"position {k + 1} has saturated confidences only: temperature 1")
        else:
            t = _search(before[seen], z[seen], records.survived[seen, k].astype(np.float64), objective, bins)
            if not GRID[1] <= t <= GRID[-2]:
                warnings.append(
                    f"position {k + 1} has temperature {t:.3g}, the end of the range: its logits say little"
                )
        temperatures.append(t)
        before = before * sigmoid(z / t)
    return Scaling(tuple(temperatures), tuple(warnings))


def _search(before: np.ndarray, z: np.ndarray, survived: np.ndarray, objective: Objective, bins: int) -> float:
    def loss(t: float) -> float:
        predictions = before * sigmoid(z / t)
        if objective == "likelihood":
            return log_loss(predictions, survived)
        return expected_calibration_error(predictions, survived, bins)

    def best(candidates: np.ndarray) -> float:
        return min(candidates.tolist(), key=lambda t: (loss(t), abs(np.log(t))))

    coarse = best(GRID)
    ratio = GRID[1] / GRID[0]
    fine = coarse * ratio ** np.linspace(-1, 1, 2 * REFINE + 1)
    # The middle is the coarse winner itself, and nothing beyond the grid is tried.
    fine[REFINE] = coarse
    return best(fine[(fine >= GRID[0]) & (fine <= GRID[-1])])
