"""Text from a growing list of tokens."""

from collections.abc import Collection, Sequence

from dspark_jax.tokenizer import ChatTokenizer

KEPT = 16
"""Tokens decoded again with every new one, at least: more than any unfinished character and its neighbours take."""


class Detokenizer:
    """Emits text as soon as it is final: bytes of an unfinished character wait for the rest of it.

    The pieces joined are the decoding of the whole list, for byte-level tokenizers and those that fall back to bytes.
    The cost a token stays constant.
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
        text = self.tokenizer.decode(self._tokens)
        # Bytes to come may change any U+FFFD at the end; in a long run of them all but the last are meant.
        long = len(self._tokens) >= 4 * KEPT
        final = max(len(text.rstrip("\ufffd")), len(text) - 1 if long else 0)
        piece, self._emitted = text[self._emitted : final], max(final, self._emitted)
        if len(self._tokens) >= 2 * KEPT and (final == len(text) or long):
            kept = self._tokens[-KEPT:]
            short = self.tokenizer.decode(kept)
            # A cut inside a character would change what follows it.
            if text.endswith(short) or long:
                self._tokens, self._emitted = kept, max(len(short) - len(text) + self._emitted, 0)
        return piece
