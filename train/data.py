"""Tokenised conversations, packed into rows, in an order that is a pure function of (seed, step)."""

import json
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.step import TokenBatch


class Piece(NamedTuple):
    """Part of a document that stands in a row: tokens first .. first + count."""

    document: int
    first: int
    count: int


def read_documents(paths: Sequence[str], vocab_size: int) -> list[tuple[np.ndarray, int]]:
    """Documents of JSONL rows {"prompt": ids, "answer": ids}: their tokens and where the answer starts.

    Args:
      vocab_size: ids must be below it.

    Raises:
      FileNotFoundError: no such file; ValueError: a row that is not such an object, with its file and line.
    """
    documents = []
    for path in paths:
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                prompt, answer = row["prompt"], row["answer"]
                tokens = np.asarray([*prompt, *answer])
                if tokens.dtype.kind != "i" or tokens.ndim != 1:
                    raise TypeError("not lists of whole numbers")
                if tokens.min() < 0 or tokens.max() >= vocab_size:
                    raise ValueError(f"ids {tokens.min()}..{tokens.max()}, the target has 0..{vocab_size - 1}")
                tokens = tokens.astype(np.int32)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f'{path}:{number} is not {{"prompt": [ids], "answer": [ids]}} ({error}); '
                    "write it with python -m train.regenerate."
                ) from error
            documents.append((tokens, len(prompt)))
    if not documents:
        raise ValueError(f"no documents in {list(paths)}; expected at least one row.")
    return documents


def frequent_tokens(documents: Sequence[tuple[np.ndarray, int]], size: int, always: Sequence[int]) -> np.ndarray:
    """The `size` most frequent answer tokens, ascending; `always` are among them, ties go to the lower id."""
    counts = np.zeros(1 + max(max(int(tokens.max()) for tokens, _ in documents), *always, size), np.int64)
    for tokens, start in documents:
        np.add.at(counts, tokens[start:], 1)
    counts[list(always)] = counts.max() + 1
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


class PackedData:
    """Documents packed first-fit into rows of `seq_len` tokens, reshuffled every epoch.

    A document longer than a row is cut into pieces, each a document of its own.
    """

    def __init__(self, documents: Sequence[tuple[np.ndarray, int]], seq_len: int, batch_size: int, seed: int):
        self.documents, self.seq_len, self.batch_size, self.seed = documents, seq_len, batch_size, seed
        self._rows = lru_cache(maxsize=2)(self._pack)

    @property
    def steps_per_epoch(self) -> int:
        """Updates until every document was seen once; a rest of less than a batch waits for a later epoch."""
        return max(len(self._rows(0)) // self.batch_size, 1)

    @property
    def crc(self) -> int:
        """Checksum of the documents: tokens, lengths and where the answers start."""
        crc = 0
        for tokens, start in self.documents:
            crc = zlib.crc32(tokens.tobytes(), zlib.crc32(np.array([len(tokens), start], np.int64).tobytes(), crc))
        return crc

    def pieces(self, step: int) -> list[list[Piece]]:
        """What the rows of an update's batch are made of; the same for the same (seed, step)."""
        epoch, inside = divmod(step, self.steps_per_epoch)
        rows = self._rows(epoch)
        first = inside * self.batch_size
        return [rows[i % len(rows)] for i in range(first, first + self.batch_size)]

    def batch(self, step: int) -> TokenBatch:
        """The batch of an update."""
        return pack(self.documents, self.pieces(step), self.seq_len)

    def _pack(self, epoch: int) -> list[list[Piece]]:
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.documents))
        pieces = [
            Piece(int(i), first, min(self.seq_len, len(self.documents[i][0]) - first))
            for i in order
            for first in range(0, len(self.documents[i][0]), self.seq_len)
        ]
        return first_fit(pieces, self.seq_len)


def first_fit(pieces: Sequence[Piece], seq_len: int, open_rows: int = 32) -> list[list[Piece]]:
    """Puts each piece into the first of the last `open_rows` rows that has room."""
    rows: list[list[Piece]] = []
    room: list[int] = []
    for piece in pieces:
        start = max(len(rows) - open_rows, 0)
        at = next((i for i in range(start, len(rows)) if room[i] >= piece.count), len(rows))
        if at == len(rows):
            rows.append([])
            room.append(seq_len)
        rows[at].append(piece)
        room[at] -= piece.count
    return rows


def pack(documents: Sequence[tuple[np.ndarray, int]], rows: Sequence[Sequence[Piece]], seq_len: int) -> TokenBatch:
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
            ids, answer = documents[piece.document]
            here = (r, slice(at, at + piece.count))
            tokens[here] = ids[piece.first : piece.first + piece.count]
            supervised[here] = np.arange(piece.first, piece.first + piece.count) >= answer
            positions[here], segments[here] = np.arange(piece.count), number
            at += piece.count
    return TokenBatch(tokens, supervised, positions, segments)
