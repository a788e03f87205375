"""`dspark generate`: text from a prompt, drafted and verified."""

import dataclasses
import sys
import time
from typing import Annotated

import tyro
from rich.table import Table

from dspark_jax.cli.models import ModelOptions, progress, prompt_ids
from dspark_jax.decoding.generate import Generation, Generator, Request
from dspark_jax.detokenize import Detokenizer


@dataclasses.dataclass(frozen=True)
class Generate:
    """Generate text.

    Attributes:
      prompt: the user's turn; read from stdin when absent.
      raw: take the prompt as plain text, without the chat template.
      max_tokens: new tokens at most.
      temperature: 0 is greedy.
      top_k: keep this many most likely tokens; 0 is off.
      top_p: keep the most likely tokens with this mass; 1 is off.
      min_p: keep tokens at least this likely relative to the best; 0 is off.
      seed: of the random draws; a fresh one when absent.
      compare: decode plainly too, and print both speeds, the accepted length and whether the text is identical.
    """

    models: Annotated[ModelOptions, tyro.conf.OmitArgPrefixes] = dataclasses.field(default_factory=ModelOptions)
    prompt: str | None = None
    raw: bool = False
    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    compare: bool = False

    def run(self) -> None:
        """Streams the answer to stdout; everything else goes to stderr."""
        # A closed stdin is None.
        prompt = self.prompt if self.prompt is not None else sys.stdin.read().strip() if sys.stdin else ""
        if not prompt:
            raise ValueError("the prompt is empty; pass --prompt TEXT or write it to stdin.")
        target, drafter = self.models.load()
        if self.compare and drafter is None:
            raise ValueError("--compare needs a drafter; it is --drafter none now.")
        ids = prompt_ids(target, prompt, self.raw)
        assert target.tokenizer is not None  # `prompt_ids` would have refused
        seed = int(time.time_ns() % 2**31) if self.seed is None else self.seed
        request = Request(ids, self.max_tokens, self.temperature, self.top_k, self.top_p, self.min_p, seed=seed)
        generator = self.models.generator(target, drafter, self.models.drafts)
        text = Detokenizer(target.tokenizer, skip=target.config.stop_ids)
        waiting = progress.status("compiling (kept for the next run)")
        waiting.start()
        try:
            for tokens in generator.stream(request):
                waiting.stop()
                print(text.add(tokens), end="", flush=True)
        finally:
            waiting.stop()
        print(text.finish(), flush=True)
        if self.compare:
            self._compare(request, generator, Generator(target.model))

    def _compare(self, request: Request, speculative: Generator, plain: Generator) -> None:
        with progress.status("compiling and timing both ways of decoding"):
            pairs = [(_timed(plain, request), _timed(speculative, request)) for _ in range(4)][1:]
        (base, base_time), (drafted, drafted_time) = (
            min(side, key=lambda r: r[1]) for side in zip(*pairs, strict=True)
        )
        same = base.tokens == drafted.tokens
        table = Table(title="one request, decoding only, best of 3")
        for column in ("", "tokens", "seconds", "tokens/s", "tokens a round"):
            table.add_column(column, justify="left" if not column else "right")
        for name, result, seconds in (("plain", base, base_time), ("DSpark", drafted, drafted_time)):
            n = len(result.tokens)
            rate, length = f"{n / seconds:.1f}", f"{result.mean_accept_length:.2f}"
            table.add_row(name, str(n), f"{seconds:.2f}", rate, length)
        progress.print(table)
        rounds = " ".join(map(str, drafted.accept_lengths))
        progress.print(f"accepted length of each round: {rounds}")
        speedup = len(drafted.tokens) / drafted_time / (len(base.tokens) / base_time)
        if self.temperature:
            verdict = "same law, other draws" if not same else "identical"
        else:
            verdict = "identical" if same else f"differs from token {_first_difference(base, drafted)} on"
        progress.print(f"speed: {speedup:.2f}x, text: {verdict}")


def _timed(generator: Generator, request: Request) -> tuple[Generation, float]:
    start = time.perf_counter()
    result = generator.generate([request])[0]
    return result, time.perf_counter() - start


def _first_difference(a: Generation, b: Generation) -> int:
    return next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), len(a.tokens))
