"""Diagrams: what was predicted against what came true, and scalings away from home."""

from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.calibration.calibration import Calibration
from dspark_jax.calibration.drift import Drift
from dspark_jax.calibration.metrics import expected_calibration_error, reliability
from dspark_jax.calibration.records import Records
from dspark_jax.calibration.survival import to_survival_twin
from dspark_jax.whole_file import whole_file

BEFORE, AFTER = "#b0b0b0", "#1b6ca8"

FEWEST = 20
"""Rounds that a bin must hold to be drawn: the share of fewer says nothing."""


def check_plotting() -> None:
    """Checks that diagrams can be drawn.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError("diagrams need matplotlib: pip install matplotlib.") from error


def plot_reliability(path: str | Path, records: Records, calibration: Calibration) -> None:
    """Draws survival before and after calibration, a row for every domain and a column for every draft position.

    Points are bins of at least `FEWEST` rounds, their area the share of rounds in them; on the diagonal probabilities
    are right, below it they promise too much. Draw the held-out part of the records.

    Args:
      path: a .png, .svg or .pdf.

    Raises:
      ValueError: matplotlib is not installed.
    """
    check_plotting()
    from matplotlib.figure import Figure

    g, domains = records.block_size, records.domains
    figure = Figure(figsize=(1.9 * g + 0.6, 2.05 * len(domains) + 0.75), layout="constrained")
    axes = figure.subplots(len(domains), g, sharex=True, sharey=True, squeeze=False)
    for k in range(g):
        axes[-1][k].set_xlabel(f"predicted, draft {k + 1}", fontsize=8)
    for row, domain in zip(axes, domains, strict=True):
        part = records.of_domain(domain)
        for k, panel in enumerate(row):
            panel.plot([0, 1], [0, 1], color="#d8d8d8", linewidth=1, zorder=0)
            seen = part.verified[:, k]
            outcomes = part.survived[seen, k].astype(float)
            errors = []
            for color, scaling in ((BEFORE, None), (AFTER, calibration.scaling)):
                predictions = to_survival_twin(part.confidence_logits[seen], scaling)[:, k]
                errors.append(f"{100 * expected_calibration_error(predictions, outcomes, calibration.bins):.1f}")
                _curve(panel, predictions, outcomes, calibration.bins, color)
            panel.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1), aspect="equal")
            text = f"ECE {errors[0]} % → {errors[1]} %" if seen.any() else "never verified"
            panel.set_title(text, fontsize=8, pad=3)
            panel.tick_params(labelsize=7, length=2)
            panel.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(f"{domain}\nsurvived", fontsize=8)
    handles = [_handle(color, label) for color, label in ((BEFORE, "raw"), (AFTER, "calibrated"))]
    figure.legend(handles=handles, loc="outside upper right", ncols=2, fontsize=8, frameon=False)
    figure.suptitle("Survival of drafts: predicted and observed", fontsize=10, x=0.01, ha="left")
    with whole_file(path) as work:
        figure.savefig(work, dpi=160, format=Path(path).suffix[1:] or "png")


def plot_drift(path: str | Path, drift: Drift) -> None:
    """Draws the ECE of every mix (rows) on every domain (columns) and, where it is known, the throughput lost.

    Args:
      path: a .png, .svg or .pdf.

    Raises:
      ValueError: matplotlib is not installed.
    """
    check_plotting()
    from matplotlib.figure import Figure

    parts = [("mean ECE, %", 100 * drift.ece)]
    if drift.loss is not None:
        parts.append(("throughput lost, %", 100 * drift.loss))
    rows, columns = drift.ece.shape
    size = (1.6 + len(parts) * (0.95 * columns + 0.5), 0.42 * rows + 1.3)
    figure = Figure(figsize=size, layout="constrained")
    for panel, (title, values) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        top = max(float(np.nanmax(values)), 1e-9)
        panel.imshow(values, cmap="Blues", vmin=0, vmax=1.6 * top, aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            panel.text(column, row, f"{round(value, 1) + 0:.1f}", ha="center", va="center", fontsize=8)
        panel.set_title(title, fontsize=9, loc="left")
        panel.set_xticks(range(columns), drift.measured_on, fontsize=8)
        panel.set_xlabel("measured on", fontsize=8)
        panel.set_yticks(range(rows), drift.fitted_on if panel.get_subplotspec().is_first_col() else [], fontsize=8)
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
    figure.axes[0].set_ylabel("fitted on", fontsize=8)
    with whole_file(path) as work:
        figure.savefig(work, dpi=160, format=Path(path).suffix[1:] or "png")


def _curve(panel: Any, predictions, outcomes, bins: int, color: str) -> None:
    found = reliability(predictions, outcomes, bins)
    used = found.count >= FEWEST
    x, y = found.predicted[used], found.observed[used]
    panel.plot(x, y, color=color, linewidth=1.1)
    panel.scatter(x, y, s=2 + 90 * found.count[used] / max(found.count.sum(), 1), color=color, linewidths=0, zorder=3)


def _handle(color: str, label: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, marker="o", markersize=4, linewidth=1.1, label=label)
