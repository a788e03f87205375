"""Tokenised documents in flat arrays, in memory or mapped from disk."""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np

FILES = {"tokens": "i4", "ends": "i8", "flips": "i4", "flip_ends": "i8"}


class Document(NamedTuple):
    """Tokens [n] and supervised [n]: booleans, true on what the assistant wrote."""

    tokens: np.ndarray
    supervised: np.ndarray


class TokenStore(Sequence[Document]):
    """Documents whose tokens stand one after the other.

    A mask is kept as the places where it flips, from unsupervised at the document's start: 16 bytes for a prompt and
    its answer, whatever their length.

    Attributes:
      tokens: ids of all documents; ends [m]: where each document's end.
      flips: places in a document; flip_ends [m]: where each document's end.
    """

    def __init__(
        self, tokens: np.ndarray, ends: np.ndarray, flips: np.ndarray, flip_ends: np.ndarray, crc: int | None = None
    ):
        """`crc` is the checksum, where it is known."""
        self.tokens, self.ends, self.flips, self.flip_ends, self._crc = tokens, ends, flips, flip_ends, crc

    @classmethod
    def of(cls, documents: Iterable[tuple[Sequence[int] | np.ndarray, np.ndarray]]) -> "TokenStore":
        """Documents from their tokens and masks; a store is itself."""
        if isinstance(documents, TokenStore):
            return documents
        encoded = [(tokens, flips_of(np.asarray(supervised))) for tokens, supervised in documents]
        return cls.of_flips(encoded)

    @classmethod
    def of_flips(cls, documents: Iterable[tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]]):
        """Documents from their tokens and the places where their masks flip."""
        pairs = [(np.asarray(tokens, np.int32), np.asarray(flips, np.int32)) for tokens, flips in documents]
        tokens, flips = ([np.zeros(0, np.int32), *parts] for parts in (zip(*pairs, strict=True) if pairs else ([], [])))
        ends, flip_ends = (np.cumsum([len(part) for part in parts[1:]], dtype=np.int64) for parts in (tokens, flips))
        return cls(np.concatenate(tokens), ends, np.concatenate(flips), flip_ends)

    @classmethod
    def open(cls, directory: Path, crc: int | None = None) -> "TokenStore":
        """Documents that were written to a directory; their pages are read when they are used."""
        return cls(*(map_file(directory / f"{name}.{dtype}", dtype) for name, dtype in FILES.items()), crc=crc)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        tokens = self.tokens[self.starts[index] : self.ends[index]]
        return Document(tokens, mask_of(self._flips(index), len(tokens)))

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each document's tokens start, [m]."""
        return np.concatenate([[0], self.ends[:-1]]) if len(self) else self.ends

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, [m]."""
        return np.asarray(self.ends) - self.starts

    @cached_property
    def crc(self) -> int:
        """Checksum of the documents: tokens, lengths and masks."""
        if self._crc is not None:
            return self._crc
        crc = 0
        for i, length in enumerate(self.lengths):
            crc = add_crc(crc, self.tokens[self.ends[i] - length : self.ends[i]], self._flips(i))
        return crc

    def supervised_blocks(self, documents: int = 4096) -> Iterator[np.ndarray]:
        """All supervised tokens, some thousand documents' at a time."""
        for first in range(0, len(self), documents):
            last = min(first + documents, len(self))
            start, end = self.starts[first], self.ends[last - 1]
            flip_start = self.flip_ends[first - 1] if first else 0
            counts = np.diff(self.flip_ends[first:last], prepend=flip_start)
            of = np.repeat(np.arange(first, last), counts)
            delta = np.zeros(end - start + 1, np.int32)
            np.add.at(delta, self.starts[of] + self.flips[flip_start : self.flip_ends[last - 1]] - start, 1)
            odd = np.flatnonzero(counts % 2) + first
            np.add.at(delta, self.ends[odd] - start, 1)
            yield self.tokens[start:end][np.cumsum(delta)[:-1] % 2 == 1]

    def _flips(self, index: int) -> np.ndarray:
        return self.flips[self.flip_ends[index - 1] if index else 0 : self.flip_ends[index]]


def flips_of(supervised: np.ndarray) -> np.ndarray:
    """Places where a mask flips, from unsupervised before its start."""
    return np.flatnonzero(np.diff(supervised.astype(np.int8), prepend=0))


def mask_of(flips: np.ndarray, length: int) -> np.ndarray:
    """The mask that flips at these places."""
    return np.searchsorted(flips, np.arange(length), side="right") % 2 == 1


def add_crc(crc: int, tokens: np.ndarray, flips: np.ndarray) -> int:
    """The checksum of documents, once one more is added; a flip at its end says no more than its length."""
    head = np.array([len(tokens), *flips[flips < len(tokens)]], np.int64)
    return zlib.crc32(tokens.tobytes(), zlib.crc32(head.tobytes(), crc))


def map_file(path: Path, dtype: str) -> np.ndarray:
    """A file as an array to read; an empty one cannot be mapped."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


def frequent_tokens(documents: TokenStore, size: int, always: Sequence[int]) -> np.ndarray:
    """The `size` most frequent supervised tokens, ascending; `always` are among them, ties go to the lower id."""
    counts = np.zeros(1 + max(int(documents.tokens.max()), *always, size), np.int64)
    for tokens in documents.supervised_blocks():
        counts += np.bincount(tokens, minlength=len(counts))
    counts[list(always)] = counts.max() + 1
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)
