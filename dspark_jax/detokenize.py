"""Text from a growing list of tokens."""

from collections.abc import Collection, Sequence

from dspark_jax.tokenizer import ChatTokenizer

WINDOW = 6
"""Tokens of context kept, so that a token is decoded beside its neighbours and the cost a token stays constant."""


class Detokenizer:
    """Emits text as soon as it is final: bytes of an unfinished character wait for the rest of it.

    The pieces joined are the decoding of the whole list.
    """

    def __init__(self, tokenizer: ChatTokenizer, skip: Collection[int] = ()):
        self.tokenizer, self.skip = tokenizer, frozenset(skip)
        self._context: list[int] = []
        self._pending: list[int] = []

    def add(self, tokens: Sequence[int]) -> str:
        """Adds tokens and returns the text that became final."""
        return "".join(self._one(token) for token in tokens if token not in self.skip)

    def finish(self) -> str:
        """The rest, with a replacement character where the text ends inside a character."""
        before = self.tokenizer.decode(self._context)
        rest = self.tokenizer.decode(self._context + self._pending)[len(before) :]
        self._context, self._pending = [], []
        return rest

    def _one(self, token: int) -> str:
        self._pending.append(token)
        before = self.tokenizer.decode(self._context)
        text = self.tokenizer.decode(self._context + self._pending)
        # A real replacement character, spelled out in the text, is not held back for ever: no UTF-8 character is longer
        # than four bytes, so four pending tokens complete whatever was open.
        if text.endswith("\ufffd") and len(self._pending) < 4:
            return ""
        self._context, self._pending = (self._context + self._pending)[-WINDOW:], []
        return text[len(before) :]
