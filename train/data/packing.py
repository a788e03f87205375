"""Documents packed into rows, in an order that is a pure function of (seed, step)."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from train.data.store import Document, TokenStore
from train.step import TokenBatch


class Piece(NamedTuple):
    """Part of a document that stands in a row: tokens first .. first + count."""

    document: int
    first: int
    count: int


class PackedData:
    """Documents packed first-fit into rows of `seq_len` tokens, reshuffled every epoch.

    A document longer than a row is cut into pieces, each a document of its own. An update's rows do not depend on how
    many devices share them: each takes its part of them.
    """

    def __init__(self, documents: Sequence[Document], seq_len: int, batch_size: int, seed: int):
        self.documents = TokenStore.of(documents)
        self.seq_len, self.batch_size, self.seed = seq_len, batch_size, seed
        self._rows = lru_cache(maxsize=2)(self._pack)

    @property
    def steps_per_epoch(self) -> int:
        """Updates until every document was seen once; a rest of less than a batch waits for a later epoch."""
        return max(len(self._rows(0)[1]) // self.batch_size, 1)

    @property
    def efficiency(self) -> float:
        """Share of the rows' places that hold tokens."""
        return len(self.documents.tokens) / (len(self._rows(0)[1]) * self.seq_len)

    @property
    def crc(self) -> int:
        """Checksum of the documents: tokens, lengths and masks."""
        return self.documents.crc

    def pieces(self, step: int, part: int = 0, parts: int = 1) -> list[list[Piece]]:
        """What the rows of an update's batch are made of; the same for the same (seed, step).

        Args:
          part: which of `parts` equal parts of the rows.

        Raises:
          ValueError: the rows of a batch cannot be shared equally.
        """
        if self.batch_size % parts or not 0 <= part < parts:
            raise ValueError(
                f"batch_size {self.batch_size} is not shared equally by {parts} devices; make it a multiple."
            )
        epoch, inside = divmod(step, self.steps_per_epoch)
        pieces, ends = self._rows(epoch)
        share = self.batch_size // parts
        first = inside * self.batch_size + part * share
        rows = [i % len(ends) for i in range(first, first + share)]
        starts = [int(ends[i - 1]) if i else 0 for i in rows]
        return [[Piece(*p) for p in pieces[a : ends[i]].tolist()] for a, i in zip(starts, rows, strict=True)]

    def batch(self, step: int, part: int = 0, parts: int = 1) -> TokenBatch:
        """The batch of an update, or a part of its rows."""
        return pack(self.documents, self.pieces(step, part, parts), self.seq_len)

    def _pack(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """All pieces [n, 3] of an epoch, row by row, and where each row's end."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.documents))
        lengths = self.documents.lengths[order]
        parts = -(-lengths // self.seq_len)
        number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        first = number * self.seq_len
        counts = np.minimum(np.repeat(lengths, parts) - first, self.seq_len)
        row = assign_rows(counts, self.seq_len)
        by_row = np.argsort(row, kind="stable")
        pieces = np.stack([np.repeat(order, parts), first, counts], axis=1).astype(np.int32)[by_row]
        return pieces, np.cumsum(np.bincount(row))


def assign_rows(counts: np.ndarray, seq_len: int, open_rows: int = 32) -> np.ndarray:
    """The row of each piece: the first of the last `open_rows` rows that has room."""
    rows = np.empty(len(counts), np.int64)
    room: list[int] = []
    closed = 0  # rows before the open ones
    for i, count in enumerate(counts.tolist()):
        for at, left in enumerate(room):
            if left >= count:
                room[at] -= count
                break
        else:
            at = len(room)
            room.append(seq_len - count)
            if at == open_rows:
                del room[0]
                closed += 1
                at -= 1
        rows[i] = closed + at
    return rows


def first_fit(pieces: Sequence[Piece], seq_len: int, open_rows: int = 32) -> list[list[Piece]]:
    """Puts each piece into the first of the last `open_rows` rows that has room."""
    numbers = assign_rows(np.array([piece.count for piece in pieces], np.int64), seq_len, open_rows)
    rows: list[list[Piece]] = [[] for _ in range(int(numbers.max(initial=-1)) + 1)]
    for number, piece in zip(numbers, pieces, strict=True):
        rows[number].append(piece)
    return rows


def pack(documents: Sequence[Document], rows: Sequence[Sequence[Piece]], seq_len: int) -> TokenBatch:
    """The token batch of packed rows."""
    shape = (len(rows), seq_len)
    tokens, supervised = np.zeros(shape, np.int32), np.zeros(shape, bool)
    positions, segments = (
        np.broadcast_to(np.arange(seq_len, dtype=np.int32), shape).copy(),
        np.full(shape, -1, np.int32),
    )
    for r, row in enumerate(rows):
        at = 0
        for number, piece in enumerate(row):
            ids, mask = documents[piece.document]
            here = (r, slice(at, at + piece.count))
            tokens[here] = ids[piece.first : piece.first + piece.count]
            supervised[here] = mask[piece.first : piece.first + piece.count]
            positions[here], segments[here] = np.arange(piece.count), number
            at += piece.count
    return TokenBatch(tokens, supervised, positions, segments)
