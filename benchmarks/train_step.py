"""Memory and speed of the chunked loss against its dense twin, forward and backward:

python -m benchmarks.train_step

Each measurement is a process of its own, the two variants take turns, and the table shows medians. Peak is what the
process, or the accelerator, holds at most, less what it held before the first call.
"""

import dataclasses
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from train.losses import Labels, LossWeights, Predictions, dspark_loss

Variant = Literal["chunked", "dense"]


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """Measure the loss of a training step.

    Attributes:
      rows: block positions; the default is 4 sequences of 128 anchors and blocks of 7.
      vocab, hidden, rank: the default is SmolLM2-135M, its whole vocabulary drafted.
      chunk: rows whose logits exist at once in the chunked variant.
      processes: measurements of each variant; calls: timed calls in each.
      variant: measure this one here and print JSON, instead of both in processes of their own.
    """

    rows: int = 4 * 128 * 7
    vocab: int = 49152
    hidden: int = 576
    rank: int = 64
    chunk: int = 512
    processes: int = 3
    calls: int = 2
    variant: Variant | None = None

    def run(self) -> None:
        """Prints the table, or one measurement."""
        if self.variant:
            print(json.dumps(self.measure(self.variant)))
            return
        results: dict[Variant, list[dict[str, float]]] = {"chunked": [], "dense": []}
        for _ in range(self.processes):
            for variant, measured in results.items():
                command = [sys.executable, "-m", "benchmarks.train_step", *sys.argv[1:], "--variant", variant]
                measured.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        medians = {v: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for v, rs in results.items()}
        ratio = {k: medians["chunked"][k] / medians["dense"][k] for k in medians["dense"]}
        table = Table(title=f"{self.rows} positions, vocabulary {self.vocab}, hidden {self.hidden}, rank {self.rank}")
        for column in ("", "peak MB", "XLA temporaries MB", "seconds", "positions/s"):
            table.add_column(column, justify="right" if column else "left")
        for variant, m in medians.items():
            sizes = (f"{m[k] / 1e6:,.0f}" for k in ("peak", "temporaries"))
            name = variant if variant == "dense" else f"chunked, {self.chunk}"
            table.add_row(name, *sizes, f"{m['seconds']:.2f}", f"{self.rows / m['seconds']:,.0f}")
        times = f"{ratio['seconds']:.2f}", f"{1 / ratio['seconds']:.2f}"
        table.add_row("ratio", *(f"{ratio[k]:.2f}" for k in ("peak", "temporaries")), *times)
        console = Console()
        console.print(table)
        device = jax.devices()[0]
        console.print(
            f"{device.device_kind} ({platform.machine()}), jax {jax.__version__}, Python {platform.python_version()}, "
            f"medians of {self.processes} processes a variant, {self.calls} calls each"
        )

    def measure(self, variant: Variant) -> dict[str, float]:
        """Peak bytes, XLA's temporary bytes and median seconds a call of one variant."""
        predictions, labels = self.inputs()

        def loss(predictions, labels):
            return dspark_loss(predictions, labels, LossWeights(), self.chunk, implementation=variant)[0]

        step = jax.jit(jax.value_and_grad(loss)).lower(predictions, labels).compile()
        before, seconds = held(), []
        for _ in range(1 + self.calls):
            start = time.perf_counter()
            jax.block_until_ready(step(predictions, labels))
            seconds.append(time.perf_counter() - start)
        return {
            "peak": held(peak=True) - before,
            "temporaries": step.memory_analysis().temp_size_in_bytes,
            "seconds": statistics.median(seconds[1:]),
        }

    def inputs(self) -> tuple[Predictions, Labels]:
        """Random predictions and labels."""
        keys = iter(jax.random.split(jax.random.key(0), 8))
        normal = lambda *shape: jax.random.normal(next(keys), shape)  # noqa: E731
        n, v, d, r = self.rows, self.vocab, self.hidden, self.rank
        head = normal(v, d) * d**-0.5
        tokens = jax.random.randint(next(keys), (1, n), 0, v)
        predictions = Predictions(normal(1, n, d), normal(1, n, r), 0.1 * normal(v, r), normal(1, n))
        return jax.block_until_ready((predictions, Labels(normal(1, n, d), tokens, jnp.ones((1, n)), head, head, None)))


def held(peak: bool = False) -> int:
    """Bytes held now, or at most so far: by the accelerator, or on a CPU by this process (Linux)."""
    if stats := jax.devices()[0].memory_stats():
        return stats["peak_bytes_in_use" if peak else "bytes_in_use"]
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    tyro.cli(TrainStep, prog="python -m benchmarks.train_step").run()
