"""Text from a growing list of tokens."""

from collections.abc import Collection, Sequence

from dspark_jax.tokenizer import ChatTokenizer

KEPT = 16
"""Tokens decoded again with every new one, at least: more than any unfinished character and its neighbours take."""


class Detokenizer:
    """Emits text as soon as it is final: bytes of an unfinished character wait for the rest of it.

    The pieces joined are the decoding of the whole list, for byte-level tokenizers. The cost a token stays constant.
    """

    def __init__(self, tokenizer: ChatTokenizer, skip: Collection[int] = ()):
        self.tokenizer = tokenizer
        self.skip = frozenset(skip) | tokenizer.special_ids
        self._tokens: list[int] = []
        self._emitted = 0  # characters of the decoding of _tokens

    def add(self, tokens: Sequence[int]) -> str:
        """Adds tokens and returns the text that became final."""
        return "".join(self._one(token) for token in tokens if token not in self.skip)

    def finish(self) -> str:
        """The rest, with a replacement character where the text ends inside a character."""
        rest = self.tokenizer.decode(self._tokens)[self._emitted :]
        self._tokens, self._emitted = [], 0
        return rest

    def _one(self, token: int) -> str:
        self._tokens.append(token)
        text, final = self._decode()
        piece, self._emitted = text[self._emitted : final], max(final, self._emitted)
        if len(self._tokens) >= 2 * KEPT:
            self._tokens = self._tokens[-KEPT:]
            self._emitted = self._decode()[1]
        return piece

    def _decode(self) -> tuple[str, int]:
        """The text of the kept tokens, and how much of it is final: bytes yet to come may only change a last U+FFFD."""
        text = self.tokenizer.decode(self._tokens)
        return text, len(text) - text.endswith("\ufffd")
