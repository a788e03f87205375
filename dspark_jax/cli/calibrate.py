"""`dspark calibrate`: temperatures that make confidences probabilities, and what they are worth."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dspark_jax.calibration.calibration import (
    ALL,
    Calibration,
    calibrate,
    measure_domains,
    read_calibration,
    write_calibration,
)
from dspark_jax.calibration.diagrams import check_plotting, plot_drift, plot_reliability
from dspark_jax.calibration.drift import Drift, Scheduler, measure_drift
from dspark_jax.calibration.metrics import BINS, Measures
from dspark_jax.calibration.records import Records, join, read_records
from dspark_jax.calibration.scaling import MINIMUM, Objective
from dspark_jax.calibration.survival import Scaling
from dspark_jax.scheduling.costs import load_costs
from dspark_jax.scheduling.policies import Oracle
from dspark_jax.scheduling.pool import Round

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Calibrate:
    """Fit temperatures, and shifts.

    Attributes:
      records: .npz files that `dspark evaluate --records` wrote.
      out: where the temperatures go, as JSON that SGLang reads too.
      check: fit nothing; measure the fit in this file on all the records, to see whether it still holds; with
        --no-shifts its temperatures alone.
      plot: where reliability diagrams of the prompts held out go (.png, .svg, .pdf).
      drift: also fit on every domain, and on all but every domain, and measure on each.
      drift_plot: where a picture of that goes.
      costs: with drift, also what wrong temperatures cost: throughput by this table of `dspark profile`, lost against
        temperatures of the domain itself. The records must be of whole blocks.
      requests: how many run side by side there.
      domain: only rounds of these domains; all when absent.
      temperature: only rounds sampled at this temperature; all when absent.
      shifts: beside temperatures alone, also fit temperatures with shifts, which this library then applies; servers
        that know no shifts read the file as well, and apply the former.
      objective: what temperatures alone minimise: ece as in the paper, or likelihood, steadier on few rounds.
      held_out: share of every domain's prompts that temperatures are measured on, and not fitted on.
      seed: of the split.
      bins: of the calibration error.
      minimum: rounds that must have tested a position, or it keeps temperature 1.
    """

    records: tyro.conf.Positional[tuple[str, ...]]
    out: str = "calibration.json"
    check: str | None = None
    plot: str | None = None
    drift: bool = False
    drift_plot: str | None = None
    costs: str | None = None
    requests: int = 8
    domain: tuple[str, ...] = ()
    temperature: float | None = None
    shifts: bool = True
    objective: Objective = "ece"
    held_out: float = 0.5
    seed: int = 0
    bins: int = BINS
    minimum: int = MINIMUM

    def run(self) -> None:
        """Prints calibration error and discrimination by position before and after, for the mix and every domain."""
        if not self.records:
            raise ValueError("expected at least one file of records; `dspark evaluate DATA --records FILE` writes one.")
        if not self.drift and (self.costs is not None or self.drift_plot is not None):
            raise ValueError("--costs and --drift-plot are about drift; pass --drift with them.")
        if self.plot is not None or self.drift_plot is not None:
            check_plotting()
        records = self._read()
        scheduler = self._scheduler(records.block_size)
        console = Console()
        if self.check is not None:
            known = read_calibration(self.check)
            if self.drift:
                raise ValueError("--check fits nothing and --drift fits; pass one of them.")
            known = known if self.shifts else dataclasses.replace(known, platt=None)
            g, scaling = records.block_size, known.scaling_for(records.block_size, records.drafter)
            platt = known.platt and scaling
            known = dataclasses.replace(known, temperatures=known.temperatures[:g], platt=platt, bins=self.bins)
            measured, measures = records, measure_domains(records, scaling, self.bins)
            self._print(console, known, measures, f"{self.check} on all rounds")
        else:
            names = ("shifts", "objective", "held_out", "seed", "bins", "minimum")
            options = {name: getattr(self, name) for name in names}
            known = calibrate(records, **options)
            measured = records.split(self.held_out, self.seed)[1]
            self._print(console, known, known.measures, "prompts held out")
            if self.drift:
                drift = measure_drift(records, **options, scheduler=scheduler)
                console.print("mean ECE on prompts held out of each domain, by what temperatures were fitted on")
                if drift.loss is not None:
                    console.print(f"and the throughput lost by it, {self.requests} requests side by side")
                console.print(drift_table(drift))
                if self.drift_plot is not None:
                    plot_drift(self.drift_plot, drift)
                    console.print(f"wrote {self.drift_plot}")
            write_calibration(self.out, known)
            console.print(f"wrote {self.out}")
        if self.plot is not None:
            plot_reliability(self.plot, measured, known)
            console.print(f"wrote {self.plot}")

    def _scheduler(self, block_size: int) -> Scheduler | None:
        """The best lengths by the cost table for what is believed: nothing but the belief makes a difference."""
        if self.costs is None:
            return None
        r, costs = self.requests, load_costs(self.costs).at()
        if r < 1:
            raise ValueError(f"--requests must be at least 1, got {r}.")
        if (widest := costs.widths(r, block_size)[-1]) <= block_size:
            raise ValueError(
                f"{self.costs} ends at {r * widest} tokens for {r} requests, {r * (1 + block_size)} with whole blocks; "
                "measure it with `dspark profile`, or pass fewer --requests."
            )
        policy, round = Oracle(costs), Round(jnp.ones(r, bool), jnp.full(r, block_size))
        lengths = jax.jit(lambda survival: policy.lengths(survival, round))
        seconds = costs.seconds(r, jnp.arange(r * (1 + block_size) + 1))
        return Scheduler(lengths, 1 / np.asarray(seconds), r)

    def _read(self) -> Records:
        records = join([read_records(path) for path in self.records])
        records = records.of_domain(*self.domain) if self.domain else records
        if self.temperature is None:
            if len(several := np.unique(records.temperature)) > 1:
                log.warning(
                    "Rounds sampled at temperatures %s are taken together, and confidences mean another thing at each; "
                    "--temperature picks those you will run.", ", ".join(f"{t:g}" for t in several),
                )  # fmt: skip
            return records
        records = records.where(records.temperature == np.float32(self.temperature))
        if not len(records):
            raise ValueError(f"no rounds were sampled at temperature {self.temperature:g}.")
        present = set(records.domain.tolist())
        return records.of_domain(*(name for i, name in enumerate(records.domains) if i in present))

    def _print(
        self, console: Console, known: Calibration, measures: Mapping[str, tuple[Measures, Measures]], where: str
    ) -> None:
        console.print(f"temperatures: {_numbers(known.temperatures)}", soft_wrap=True)
        if (platt := known.platt) is not None and platt.shifts:
            text = f"with shifts: temperatures {_numbers(platt.temperatures)}, shifts {_numbers(platt.shifts)}"
            console.print(text, soft_wrap=True)
        for domain, (before, after) in measures.items():
            if len(measures) == 2 and domain != ALL:
                continue  # the only domain is the mix
            errors = f"mean ECE {_share(before.mean_ece)} before, {_share(after.mean_ece)} after"
            console.print(f"{domain}, {where}: {errors}", soft_wrap=True)
            console.print(position_table(before, after))


def position_table(before: Measures, after: Measures) -> Table:
    """How good survival is at every draft position, before and after: the table of the paper's Figure 6.

    `of c` is the AUC of the draft's own confidence where it was tested, which no scaling changes; `chance` the ECE
    that perfect probabilities would show on as many rounds.
    """
    table = Table(box=SIMPLE_HEAD, collapse_padding=True)
    for column in ("draft", "rounds", "AUC", "after", "of c", "ECE", "after", "chance", "Brier", "after"):
        table.add_column(column, justify="right")
    for k in range(len(before.rounds)):
        table.add_row(
            str(k + 1), str(before.rounds[k]),
            _number(before.auc[k]), _number(after.auc[k]), _number(after.confidence_auc[k]),
            _share(before.ece[k]), _share(after.ece[k]), _share(after.chance[k]),
            _number(before.brier[k]), _number(after.brier[k]),
        )  # fmt: skip
    return table


def drift_table(drift: Drift) -> Table:
    """Mean ECE of a scaling fitted on one mix (rows) and measured on a domain (columns), and throughput lost."""
    table = Table(box=SIMPLE_HEAD)
    for column in ("fitted on", "scaling", *drift.measured_on):
        table.add_column(column, justify="left" if column == "fitted on" else "right")
    for m, name in enumerate(drift.fitted_on):
        cells = [_share(error) for error in drift.ece[m]]
        if drift.loss is not None:
            cells = [f"{cell}, {loss:+.1%}" for cell, loss in zip(cells, drift.loss[m], strict=True)]
        table.add_row(name, _scaling(drift.scalings[m]), *cells)
    return table


def _scaling(scaling: Scaling | None) -> str:
    if scaling is None:
        return "-"
    temperatures = _numbers(scaling.temperatures, 2)
    return temperatures if not scaling.shifts else f"{temperatures}\n{_numbers(scaling.shifts, 2)}"


def _numbers(values: Sequence[float], digits: int = 3) -> str:
    return " ".join(f"{x:.{digits}f}" for x in values)


def _number(x: float) -> str:
    return "-" if x != x else f"{x:.3f}"


def _share(x: float) -> str:
    return "-" if x != x else f"{x:.2%}"
