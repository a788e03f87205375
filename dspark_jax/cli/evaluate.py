"""`dspark evaluate`: accepted lengths of a drafter on prompts."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dspark_jax.calibration.fingerprint import drafter_fingerprint
from dspark_jax.calibration.records import join, record_rounds, write_records
from dspark_jax.cli.models import ModelOptions, progress, prompt_ids
from dspark_jax.decoding.generate import Request, whole_chunks
from dspark_jax.evaluation import acceptance, generate_many, read_prompts


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Measure accepted lengths.

    Attributes:
      data: JSONL files of {"turns": [text, ...]} rows; a file is a row of the table.
      limit: prompts of each file.
      temperatures: each is measured in turn.
      max_tokens: new tokens a prompt at most.
      rows: prompts at a time.
      records: an .npz where every round goes, for `dspark calibrate`; a file's stem is its domain.
    """

    data: tyro.conf.Positional[tuple[str, ...]]
    models: Annotated[ModelOptions, tyro.conf.OmitArgPrefixes] = dataclasses.field(default_factory=ModelOptions)
    limit: int = 100
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 128
    rows: int = 8
    records: str | None = None
    seed: int = 0

    def run(self) -> None:
        """Prints accepted length with 95 % intervals and conditional acceptance by position."""
        if not self.data:
            raise ValueError('expected at least one file of {"turns": [text, ...]} rows.')
        if self.limit < 1:
            raise ValueError(f"--limit must be 1 or more, got {self.limit}.")
        texts = {path: read_prompts(path, self.limit) for path in self.data}
        target, drafter = self.models.load()
        if drafter is None:
            raise ValueError("evaluate needs a drafter; it is --drafter none now.")
        positions = target.config.max_positions
        files = {path: _fitting(path, [prompt_ids(target, t) for t in texts[path]], positions) for path in texts}
        longest = max(len(ids) for prompts in files.values() for ids in prompts) + self.max_tokens
        slots = whole_chunks(min(longest, positions))
        generator = self.models.generator(target, drafter, self.models.block_size)
        table = Table(title=f"accepted length, bonus included, {self.limit} prompts a file, {self.max_tokens} tokens")
        for column in ("file", "T", "tau", "95 %", "rounds", "conditional acceptance by position"):
            table.add_column(column)
        recorded = []
        about = {"stop_ids": target.config.stop_ids, "drafter": drafter_fingerprint(drafter)}
        for path, prompts in files.items():
            for t in self.temperatures:
                requests = [Request(p, self.max_tokens, t, seed=self.seed + i) for i, p in enumerate(prompts)]
                results = generate_many(generator, requests, rows=self.rows, slots=slots)
                done = dict(track(results, f"{path} T={t:g}", len(requests), console=progress))
                generations = [done[i] for i in range(len(requests))]
                found = acceptance(generations, self.models.block_size or drafter.config.block_size)
                if self.records is not None:
                    rounds = [g.drafted() for g in generations]
                    recorded.append(record_rounds(rounds, requests, domain=Path(path).stem, **about))
                    write_records(self.records, join(recorded))
                rates = " ".join(f"{rate:.2f}" for rate in found.conditional)
                interval = f"{found.low:.2f} to {found.high:.2f}"
                table.add_row(path.rsplit("/", 1)[-1], f"{t:g}", f"{found.tau:.2f}", interval, str(found.rounds), rates)
        Console(width=None).print(table)
        if self.records is not None:
            progress.print(f"wrote {self.records}")


def _fitting(path: str, prompts: list[list[int]], positions: int) -> list[list[int]]:
    """The prompts that leave room for a token; says how many do not."""
    fitting = [ids for ids in prompts if 0 < len(ids) < positions]
    if not fitting:
        raise ValueError(f"{path} holds no prompt of 1 to {positions - 1} tokens, which the target takes.")
    if skipped := len(prompts) - len(fitting):
        said = f"{path}: {skipped} of {len(prompts)} prompts skipped, not within 1 to {positions - 1} tokens"
        progress.print(said, soft_wrap=True)
    return fitting
