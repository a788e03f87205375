"""Hidden states of the frozen target on disk: a record a document, in shards that any number of processes write.

Of every token a record holds the final hidden state, the taps and the logits' normalizer. A shard gets its name when it
is whole, and its name tells its documents; docs/training.md has the layout.
"""

import dataclasses
import errno
import json
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from flax import nnx

from dspark_jax.models.decoder import Decoder
from dspark_jax.sharding import constrain
from dspark_jax.whole_file import whole_file
from train.data import Piece, TokenStore

SHARD = re.compile(r"(\d+)-(\d+)-([0-9a-f]{8})\.array_record")


@dataclasses.dataclass(frozen=True)
class Note:
    """What the features of a directory are.

    Attributes:
      target: its `fingerprint`; hidden_size: d; taps: m tap ids, in the order of their states.
      dtype: of the states; int8 has a float32 scale a token and state.
    """

    target: int
    hidden_size: int
    taps: tuple[int, ...]
    dtype: Literal["bfloat16", "int8"]

    @property
    def token(self) -> np.dtype:
        """A token of a record: `normalizer`, `scales` [1 + m] (none in bfloat16) and `states` [1 + m, d]."""
        states, int8 = 1 + len(self.taps), self.dtype == "int8"
        stored = np.int8 if int8 else ml_dtypes.bfloat16
        scales = ("scales", "<f4", (states if int8 else 0,))
        return np.dtype([("normalizer", "<f4"), scales, ("states", stored, (states, self.hidden_size))])

    @classmethod
    def read(cls, path: Path) -> "Note":
        """The note of a directory; ValueError where it is none."""
        try:
            note = cls(**json.loads(path.read_text()))
            return dataclasses.replace(note, taps=tuple(note.taps))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is no note of features ({error}); delete {path.parent}.") from error


class FeatureStore:
    """Features of documents in a directory, as far as they are there.

    Attributes:
      missing: documents that are not there.
    """

    def __init__(self, directory: Path, documents: TokenStore, wanted: Note):
        """Opens a directory, which may be empty or not there.

        Raises:
          ValueError: it holds features of another target, without some of the taps, in another dtype or of other
            documents, or a shard that is damaged.
        """
        self.directory, self.documents = directory, documents
        path = directory / "note.json"
        self.note = Note.read(path) if path.is_file() else wanted
        there, here = (dataclasses.asdict(note) for note in (self.note, wanted))
        if set(here["taps"]) <= set(there["taps"]):
            del here["taps"]
        if changed := {name: (there[name], value) for name, value in here.items() if there[name] != value}:
            raise ValueError(
                f"{directory} holds other features (field: (there, here)): {changed}. Delete it, or keep these "
                "elsewhere."
            )
        columns, self._count = [0, *(1 + self.note.taps.index(tap) for tap in wanted.taps)], 1 + len(wanted.taps)
        # A slice where all are read: a view, and no copy.
        self._columns = slice(None) if self.note.taps == wanted.taps else columns
        self._shards: list[tuple[Path, int, int]] = []
        self._shard = np.full(len(documents), -1, np.int32)
        self._reader = lru_cache(maxsize=128)(self._open)
        for path in sorted(directory.glob("*.array_record")):
            known = SHARD.fullmatch(path.name)
            first, last = map(int, known.groups()[:2]) if known else (0, 0)
            if not 0 <= first < last <= len(documents) or path != self.path(first, last):
                raise ValueError(
                    f"{path} holds features of other documents. Delete {directory}, or keep these elsewhere."
                )
            self.add(first, last)

    def prepare(self) -> None:
        """Makes the directory one to write to: with a note, and without what a killed pass left half written."""
        for part in self.directory.glob(".*.part"):
            part.unlink()
        note = self.directory / "note.json"
        if not note.is_file():  # else another run wrote it while this one waited
            with whole_file(note) as work:
                work.write_text(json.dumps(dataclasses.asdict(self.note)) + "\n")

    @property
    def missing(self) -> np.ndarray:
        return np.flatnonzero(self._shard < 0)

    def path(self, first: int, last: int) -> Path:
        """The shard of documents first .. last - 1."""
        lengths = self.documents.lengths[first:last].astype("<i8")
        tokens = self.documents.tokens[self.documents.starts[first] : self.documents.ends[last - 1]].astype("<i4")
        crc = zlib.crc32(tokens.data, zlib.crc32(lengths.data))
        return self.directory / f"{first:09}-{last:09}-{crc:08x}.array_record"

    def add(self, first: int, last: int) -> None:
        """Takes a shard that is there; ValueError where it is damaged."""
        self._shard[first:last] = len(self._shards)
        self._shards.append((self.path(first, last), first, last))
        self._reader(len(self._shards) - 1)

    def plan(self, tokens: int) -> list[tuple[int, int]]:
        """Shards (first, last) of what is missing, of about so many tokens.

        Raises:
          OSError: the disk has no room for them.
        """
        missing = self.missing
        lengths = self.documents.lengths[missing]
        needed, free = int(lengths.sum()) * self.note.token.itemsize, shutil.disk_usage(self.directory).free
        if needed > free:
            told = f"{needed / 1e9:.2f} GB are missing for features, {free / 1e9:.2f} GB free"
            raise OSError(errno.ENOSPC, told, str(self.directory))
        # A shard ends where so many tokens are full, and in front of documents that are there.
        number = np.stack([(np.cumsum(lengths) - lengths) // tokens, missing - np.arange(len(missing))])
        parts = np.split(missing, 1 + np.flatnonzero(np.diff(number).any(axis=0)))
        return [(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]

    @contextmanager
    def shard(self, first: int, last: int) -> Iterator[ArrayRecordWriter]:
        """Writes a shard, which must get a record a document; OSError: it cannot be written, as on a full disk."""
        path = self.path(first, last)
        try:
            with whole_file(path) as work:
                # States hardly shrink by compression; each record is a chunk of its own, to be read alone.
                writer = ArrayRecordWriter(str(work), "group_size:1,uncompressed")
                yield writer
                writer.close()
        except RuntimeError as error:
            raise OSError(f"cannot write {path}: {error}") from error

    def rows(self, rows: Sequence[Sequence[Piece]], seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Hidden states [b, t, d] and taps [b, t, m * d], bfloat16, and normalizers [b, t] of packed rows.

        Raises:
          ValueError: a document that is missing or damaged.
        """
        shape, d, int8 = (len(rows), seq_len), self.note.hidden_size, self.note.dtype == "int8"
        states = np.zeros((*shape, self._count, d), ml_dtypes.bfloat16)
        normalizers = np.zeros(shape, np.float32)
        for r, row in enumerate(rows):
            at = 0
            for piece in row:
                tokens = self._read(piece.document)[piece.first : piece.first + piece.count]
                here, at = (r, slice(at, at + piece.count)), at + piece.count
                stored = tokens["states"][:, self._columns]
                states[here] = stored * tokens["scales"][:, self._columns, None] if int8 else stored
                normalizers[here] = tokens["normalizer"]
        joined = states.reshape(*shape, -1)
        return joined[..., :d], joined[..., d:], normalizers

    def _read(self, document: int) -> np.ndarray:
        """The tokens of a document [n], as `Note.token`."""
        number, expected = self._shard[document], int(self.documents.lengths[document]) * self.note.token.itemsize
        if number < 0:
            raise ValueError(f"{self.directory} has no features of document {document}.")
        path, first, _ = self._shards[number]
        try:
            (record,) = self._reader(number).read([document - first])
        except RuntimeError as error:
            raise ValueError(f"{path} is damaged, delete it to compute it anew: {error}") from error
        if len(record) != expected:
            raise ValueError(
                f"document {document} in {path} has {len(record)} bytes, expected {expected}; delete it to compute it "
                "anew."
            )
        return np.frombuffer(record, self.note.token)

    def _open(self, number: int) -> ArrayRecordReader:
        path, first, last = self._shards[number]
        reader = ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:0")
        if reader.num_records() != last - first:  # none, where its end is not there
            raise ValueError(
                f"{path} has {reader.num_records()} records, expected {last - first}; delete it to compute it anew."
            )
        return reader


def quantized(states: jax.Array) -> tuple[jax.Array, jax.Array]:
    """States [..., d] as integers within -127 .. 127, and their scales [...]."""
    largest = jnp.max(jnp.abs(states), axis=-1).astype(jnp.float32)
    scales = jnp.where(largest > 0, largest / 127, 1)
    return jnp.round(states / scales[..., None]).astype(jnp.int8), scales


def rounded(x: jax.Array) -> jax.Array:
    """Numbers that bfloat16 has. XLA may leave out a conversion there and back."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def fingerprint(target: Decoder) -> int:
    """A checksum that tells targets apart: of a corner of every parameter, in bfloat16 whatever they are in here."""
    crc = 0
    for leaf in jax.tree.leaves(jax.device_get(_corners(nnx.state(target, nnx.Param)))):
        crc = zlib.crc32(leaf.tobytes(), crc)
    return crc


@jax.jit
def _corners(params: nnx.State) -> nnx.State:
    return jax.tree.map(lambda x: constrain(x[(slice(64),) * x.ndim].astype(jnp.bfloat16)), params)
