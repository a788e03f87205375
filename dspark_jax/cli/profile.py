"""`dspark profile`: what steps cost on this machine."""

import dataclasses
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from dspark_jax.cli.models import ModelOptions, progress
from dspark_jax.scheduling.costs import CostTable
from dspark_jax.scheduling.profile import profile


@dataclasses.dataclass(frozen=True)
class Profile:
    """Measure what steps cost.

    Attributes:
      out: where the table goes, as JSON; servers that know one curve of steps per second read it too.
      rows: requests side by side.
      contexts: cache positions a row.
      widths: tokens a row to verify, anchor included; powers of two and the whole block when absent.
      repeats: timings of each, whose median counts.
      warm_up: timings before that do not count.
    """

    models: Annotated[ModelOptions, tyro.conf.OmitArgPrefixes] = dataclasses.field(default_factory=ModelOptions)
    out: str = "costs.json"
    rows: tuple[int, ...] = (1, 4)
    contexts: tuple[int, ...] = (512,)
    widths: tuple[int, ...] | None = None
    repeats: int = 7
    warm_up: int = 2

    def run(self) -> None:
        """Prints milliseconds of every step and writes the table."""
        target, drafter = self.models.load()
        if drafter is None:
            raise ValueError("profile needs a drafter; it is --drafter none now.")
        with progress.status("measuring") as status:
            table = profile(
                target.model, drafter, rows=self.rows, contexts=self.contexts, widths=self.widths,
                block_size=self.models.block_size, repeats=self.repeats, warm_up=self.warm_up,
                progress=lambda text: status.update(f"measuring {text}"),
            )  # fmt: skip
        table.save(self.out)
        console = Console()
        for name, value in (table.environment or {}).items():
            console.print(f"{name}: {value}", highlight=False)
        console.print(milliseconds(table))
        console.print(f"wrote {self.out}")


def milliseconds(costs: CostTable) -> Table:
    """A row for each context and number of requests."""
    table = Table(title="milliseconds a step")
    for column in ("context", "requests", "drafting", "verifying, by tokens"):
        table.add_column(column, justify="left" if "by" in column else "right")
    for context, step in costs.contexts:
        for s in step.stairs:
            times = "  ".join(f"{n}: {1e3 * t:.2f}" for n, t in zip(s.tokens, s.verify_seconds, strict=True))
            table.add_row(str(context), str(s.requests), f"{1e3 * s.draft_seconds:.2f}", times)
    return table
