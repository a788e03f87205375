"""Where a run's metrics go: the console, metrics.jsonl and TensorBoard."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from tensorboardX import SummaryWriter

from dspark_jax.chips import peak_flops
from dspark_jax.models.config import TargetConfig
from dspark_jax.whole_file import whole_file
from train.config import RunConfig
from train.distributed import is_main
from train.flops import model_flops


class Report:
    """Tells metrics as they come, in the main process, and times the steps between them.

    MFU is the model's FLOPs (`train.flops.model_flops`) over what all devices could do in the time, if that is known.
    """

    def __init__(self, run: RunConfig, target: TargetConfig, step: int, devices: int):
        """Goes on after update `step`: what a killed run told of later ones is forgotten, for they come again."""
        peak = peak_flops(jax.devices()[0])
        self.run = run
        self._ideal = peak and sum(model_flops(run, target).values()) / (peak * devices)
        self.console, self.file = Console(force_jupyter=False), Path(run.out) / "metrics.jsonl"
        self._timed, self._since = None, 0.0
        if is_main():
            _forget_after(self.file, step)
            self.board = SummaryWriter(str(self.file.with_name("tensorboard")), purge_step=step + 1)

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, *_: object) -> None:
        if is_main():
            self.board.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is no part of a step."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def step(self, step: int, values: dict[str, Any]) -> None:
        """Tells the metrics of an update that was just read off the device, every `log_every` updates."""
        due, now = step % self.run.log_every == 0, time.perf_counter()
        if not is_main() or not (due or self._timed is None):
            return
        # The first step compiles, so the clock starts behind it.
        speed = {} if self._timed is None else self._speed((now - self._since) / (step - self._timed))
        self._timed, self._since = step, now
        if due:
            self._write(step, values | speed)
            self._say(step, values | speed)

    def evaluation(self, step: int, lengths: dict[str, float]) -> None:
        """Tells accepted lengths by domain, of the drafter after update `step`."""
        if is_main():
            self._write(step, {"accept_length": lengths})
            told = "  ".join(f"{domain} {length:.3f}" for domain, length in lengths.items())
            self.console.print(f"step {step:5d} accepted length: {told}", soft_wrap=True)

    def _speed(self, seconds: float) -> dict[str, float]:
        """Speed of steps that take `seconds` each, and the most memory that was in use on a device, where it tells."""
        speed = {"seconds": seconds, "tokens_per_second": self.run.batch_size * self.run.seq_len / seconds}
        if self._ideal:
            speed["mfu"] = self._ideal / seconds
        if memory := jax.local_devices()[0].memory_stats():
            speed["memory_gb"] = memory["peak_bytes_in_use"] / 1e9
        return speed

    def _write(self, step: int, values: dict[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            parts = dict(enumerate(value, 1)) if isinstance(value, list) else value
            tags = {f"{name}/{part}": x for part, x in parts.items()} if isinstance(parts, dict) else {name: value}
            for tag, x in tags.items():
                self.board.add_scalar(tag, x, step)
        self.board.flush()

    def _say(self, step: int, values: dict[str, Any]) -> None:
        line = f"step {step:5d} loss {values['loss']:.4f} ce {values['ce']:.3f} l1 {values['l1']:.4f}"
        if "confidence_error" in values:
            line += f" conf {values['confidence']:.4f} (off by {values['confidence_error']:.3f})"
        rates = " ".join(f"{rate:.2f}" for rate in values["accept_rate"])
        line += f" tau {values['tau']:.3f} accept \\[{rates}]"
        if "seconds" in values:
            line += f" {values['seconds']:.2f} s/step {values['tokens_per_second']:.0f} tokens/s"
        if "mfu" in values:
            line += f" MFU {values['mfu']:.1%}"
        if "memory_gb" in values:
            line += f" {values['memory_gb']:.1f} GB"
        self.console.print(line, soft_wrap=True)


def _forget_after(file: Path, step: int) -> None:
    """Drops the lines of later steps, and what a kill or a full disk has broken."""
    if file.is_file():
        lines = file.read_text().splitlines(keepends=True)
        with whole_file(file) as work:
            work.write_text("".join(line for line in lines if line.endswith("\n") and 0 < _step(line) <= step))


def _step(line: str) -> int:
    """The step of a metrics line; 0 for a broken one."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return 0
