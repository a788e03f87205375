"""Sequential scaling: a temperature a draft position, or one and a shift, fitted left to right on the product."""

import dataclasses
from typing import Literal, get_args

import numpy as np
from scipy.optimize import minimize

from dspark_jax.calibration.metrics import BINS, expected_calibration_error, log_loss
from dspark_jax.calibration.records import Records
from dspark_jax.calibration.survival import Scaling, sigmoid

GRID = np.geomspace(0.1, 10, 41)
"""Temperatures tried first; 1 is among them."""

REFINE = 20
"""Steps between two neighbours of the grid in the second search."""

Objective = Literal["ece", "likelihood"]
"""What a temperature minimises: the paper's ECE, or the log loss, which reaches a low ECE with fewer rounds."""

MINIMUM = 100
"""A position with fewer rounds that tested it keeps temperature 1."""

SIGNIFICANT = 3.0
"""Log-likelihood that a temperature and a shift must gain over the raw logits, or these stay: half the 95th percentile
of what two needless parameters gain by chance (Wilks)."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """A fitted scaling, and what to know about positions where the fit says little."""

    scaling: Scaling
    warnings: tuple[str, ...]


def fit_scaling(
    records: Records,
    *,
    shifts: bool = False,
    objective: Objective = "ece",
    bins: int = BINS,
    minimum: int = MINIMUM,
) -> Fit:
    """Fits T_1..T_g, and b_1..b_g with `shifts`, one position after the other, the earlier ones being fixed.

    Only rounds verified up to position k count for position k. Without shifts, T_k minimises the ECE of
    a_k = prod_{i <= k} sigmoid(z_i / T_i) on a logarithmic grid, then on a finer one around its best; between equals
    the temperature nearest to 1 wins. With shifts, T_k and b_k minimise the log loss, whatever the objective for
    temperatures alone: the ECE of few rounds rewards whatever fits their noise.

    Raises:
      ValueError: no rounds, or an unknown objective.
    """
    if objective not in get_args(Objective):
        raise ValueError(f"objective must be one of {', '.join(get_args(Objective))}, got {objective!r}.")
    if not len(records):
        raise ValueError("no rounds to fit temperatures on.")
    found, warnings = [], []
    before = np.ones(len(records))
    for k in range(records.block_size):
        seen, tested = records.verified[:, k], records.at_risk[:, k]
        z = records.confidence_logits[:, k].astype(np.float64)
        t, b = 1.0, 0.0
        if (count := int(tested.sum())) < minimum:
            warnings.append(f"position {k + 1} was tested in {count} rounds, fewer than {minimum}: temperature 1")
        elif not np.isfinite(z[tested]).any() or (not shifts and not z[tested][np.isfinite(z[tested])].any()):
            warnings.append(f"position {k + 1} has saturated confidences only: temperature 1")
        else:
            position = before[seen], z[seen], records.survived[seen, k].astype(np.float64)
            t, b = _descend(*position) if shifts else (_search(*position, objective, bins), 0.0)
            if not GRID[1] <= t <= GRID[-2]:
                warnings.append(f"position {k + 1} has temperature {t:.3g}, near an end of the range searched")
        found.append((t, b))
        before = before * sigmoid(z / t + b)
    temperatures, offsets = zip(*found, strict=True)
    return Fit(Scaling(temperatures, offsets if shifts else ()), tuple(warnings))


def _search(before: np.ndarray, z: np.ndarray, survived: np.ndarray, objective: Objective, bins: int) -> float:
    """The temperature of the least loss within the grid."""

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


def _descend(before: np.ndarray, z: np.ndarray, survived: np.ndarray) -> tuple[float, float]:
    """Temperature and shift of the least log loss; 1 and 0 if chance explains what these gain."""

    def loss(x: np.ndarray) -> float:
        return log_loss(before * sigmoid(z / np.exp(x[0]) + x[1]), survived)

    found = minimize(loss, np.zeros(2), method="Nelder-Mead", bounds=(np.log(GRID[[0, -1]]), (-10, 10)))
    if (loss(np.zeros(2)) - found.fun) * len(z) < SIGNIFICANT:
        return 1.0, 0.0
    return float(np.exp(found.x[0])), float(found.x[1])
