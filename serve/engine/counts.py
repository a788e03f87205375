"""What happened in steps, summed up here and told to whoever watches."""

import dataclasses
from typing import TYPE_CHECKING, Protocol

from serve.engine.step import Results

if TYPE_CHECKING:
    from serve.engine.engine import Flight, ServeEngine


@dataclasses.dataclass
class StepCounts:
    """Sums over steps.

    Attributes:
      rows: places for tokens with logits; used: those that were anchors or drafts.
      drafted, verified, accepted: draft tokens; emitted: tokens; prefilled: tokens of prompts.
      compiled: programs after warm-up.
    """

    steps: int = 0
    drafted_steps: int = 0
    rows: int = 0
    used: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    emitted: int = 0
    prefilled: int = 0
    compiled: int = 0

    def add(self, flight: "Flight", results: Results) -> None:
        """Adds a step."""
        verified, drafted = int(results.verified.sum()), flight.choice.drafted
        self.steps += 1
        self.drafted_steps += drafted
        self.rows += flight.launch.rows
        self.used += results.used
        self.drafted += int(flight.choice.running.sum()) * results.survival.shape[1] * drafted
        self.verified += verified
        self.accepted += int(results.accepted.sum())
        self.emitted += int(results.count.sum())
        self.prefilled += int(flight.step.prefill.sum())


class Gauges(Protocol):
    """Whoever watches."""

    def set(self, engine: "ServeEngine", flight: "Flight", results: Results) -> None:
        """Called on the engine's thread after every step."""
        ...
