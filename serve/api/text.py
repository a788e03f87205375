"""Text of an answer as its tokens come: whole characters, no stop string, and log probabilities beside their text."""

import bisect
import dataclasses
from collections.abc import Sequence

from dspark_jax.detokenize import Detokenizer
from dspark_jax.tokenizer import ChatTokenizer
from serve.engine.request import FinishReason, Output, TokenLogprob


@dataclasses.dataclass(frozen=True)
class Piece:
    """What can be shown of an answer after some more tokens.

    Attributes:
      logprobs: entries of tokens, each with the offset in characters at which the token's text starts.
    """

    text: str = ""
    logprobs: tuple[tuple[TokenLogprob, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.logprobs)


class StopStrings:
    """Finds the stop string that ends first (of two that end together the longer), however the text is cut into pieces.

    Text that could be the start of one is held back until it is known not to be.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = stops
        self.found = False
        self.held = ""

    def add(self, piece: str, *, armed: bool = True) -> str:
        """Text that may be shown. `armed` False: stop strings that end in this piece do not count."""
        text, held = self.held + piece, len(self.held)
        if armed:
            starts = ((stop, text.find(stop, max(0, held - len(stop) + 1))) for stop in self.stops)
            if ends := [(start + len(stop), start) for stop, start in starts if start >= 0]:
                self.found, self.held = True, ""
                return text[: min(ends)[1]]
        kept = max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """What was held back, when nothing follows it."""
        rest, self.held = self.held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a start of `stop`, but not all of it."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0


class AnswerText:
    """One answer.

    Tokens count up to the one that completes a stop string; what the engine made behind it is dropped. The stop id that
    ends an answer counts and has a log probability, but no text.

    Attributes:
      tokens: emitted so far.
      finish_reason: how it ended.
    """

    def __init__(self, tokenizer: ChatTokenizer, stops: Sequence[str] = (), min_tokens: int = 0):
        self.tokens = 0
        self.finish_reason: FinishReason | None = None
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._length = 0  # characters of the text, held ones included
        self._waiting: list[tuple[TokenLogprob, int]] = []

    def add(self, output: Output) -> Piece:
        """Takes the tokens of a step; returns what became final."""
        shown = []
        for i, token in enumerate(output.tokens):
            self.tokens += 1
            if output.logprobs is not None:
                self._waiting.append((output.logprobs[i], self._length))
            if output.finish_reason == "stop" and i == len(output.tokens) - 1:
                break
            shown.append(self._show(self._detokenizer.add([token])))
            if self._stops.found:
                break
        if not self._stops.found and output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            shown.append(self._show(self._detokenizer.finish()))
            shown.append(self._stops.finish())
        if self._stops.found:
            self.finish_reason = "stop"
        return Piece("".join(shown), self._release())

    def _show(self, text: str) -> str:
        self._length += len(text)
        return self._stops.add(text, armed=self.tokens > self._min_tokens)

    def _release(self) -> tuple[tuple[TokenLogprob, int], ...]:
        """Entries of tokens none of whose text is held back: they would tell it."""
        ends = [*(start for _, start in self._waiting[1:]), self._length]
        n = bisect.bisect_right(ends, self._length - len(self._stops.held)) if self._waiting else 0
        released, self._waiting = tuple(self._waiting[:n]), self._waiting[n:]
        return released
