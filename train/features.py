"""Hidden states of the frozen target, computed once and kept on disk, for runs of several epochs on little hardware."""

import errno
import json
import math
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from dspark_jax.models.decoder import Decoder
from dspark_jax.whole_file import whole_file
from train.data import Document, Piece, TokenStore, first_fit, pack
from train.step import target_features


class FeatureCache:
    """Final hidden state and taps of every token of every document, in bfloat16, and its logits' normalizer.

    A killed pass goes on where it stopped, and documents appended later are added.
    """

    def __init__(
        self,
        directory: Path,
        target: Decoder,
        documents: Sequence[Document],
        tap_ids: tuple[int, ...],
        seq_len: int,
        rows: int,
    ):
        """Fills what is missing, `rows` rows of `seq_len` tokens at a time.

        Raises:
          ValueError: a document longer than a row, or features in `directory` that are cut short, or of other documents
            or taps, or of another target; OSError: the disk has no room for them.
        """
        documents = TokenStore.of(documents)
        if len(long := np.flatnonzero(documents.lengths > seq_len)):
            raise ValueError(
                f"documents {long[:5].tolist()} are longer than seq_len {seq_len}; raise it or use live features."
            )
        directory.mkdir(parents=True, exist_ok=True)
        graph, params = nnx.split(target)
        self.hidden_size = target.config.hidden_size
        self.starts = np.concatenate([[0], documents.ends])
        note = directory / "done.json"
        empty = {"documents": 0, "crc": 0, "lengths": 0, "taps": list(tap_ids), "target": _fingerprint(params)}
        there = json.loads(note.read_text()) if note.is_file() else empty
        have = there["documents"]
        known = _with(empty, documents, 0, min(have, len(documents)))
        if there != known:
            raise ValueError(
                f"{directory} holds features of other documents or taps, or of another target; delete it to compute "
                "them anew."
            )
        count, filled = int(self.starts[-1]), int(self.starts[have])
        width = (1 + len(tap_ids)) * self.hidden_size
        self.array = _map(directory / "features.bf16", ml_dtypes.bfloat16, (count, width), filled)
        self.normalizers = _map(directory / "normalizers.f32", np.float32, (count,), filled)

        @jax.jit
        def run(params, batch):
            target = nnx.merge(graph, params)
            hidden, taps = target_features(target, batch, tap_ids)
            stored = jnp.concatenate([hidden, taps], axis=-1).astype(jnp.bfloat16)
            # Of the hidden states as they are stored, so that probabilities computed from both add up to one.
            rounded = stored[..., : hidden.shape[-1]].astype(target.dtype)
            normalizers = jax.lax.map(lambda row: jax.nn.logsumexp(target.logits(row), axis=-1), rounded)
            return stored, normalizers

        waiting = first_fit([Piece(i, 0, int(documents.lengths[i])) for i in range(have, len(documents))], seq_len, 1)
        for first in range(0, len(waiting), rows):
            chunk = waiting[first : first + rows]
            out = jax.device_get(run(params, pack(documents, chunk + [[]] * (rows - len(chunk)), seq_len)))
            for row, normalizers, pieces in zip(*out, chunk, strict=False):
                at = 0
                for piece in pieces:
                    start = self.starts[piece.document]
                    self.array[start : start + piece.count] = row[at : at + piece.count]
                    self.normalizers[start : start + piece.count] = normalizers[at : at + piece.count]
                    at += piece.count
            self.array.flush()
            self.normalizers.flush()
            done = chunk[-1][-1].document + 1
            known, have = _with(known, documents, have, done), done
            with whole_file(note) as work:
                work.write_text(json.dumps(known))
            print(f"target features: {have} of {len(documents)} documents", flush=True)

    def rows(self, rows: Sequence[Sequence[Piece]], seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Hidden states [b, t, d], taps [b, t, m * d] and normalizers [b, t] of packed rows."""
        out = np.zeros((len(rows), seq_len, self.array.shape[1]), ml_dtypes.bfloat16)
        normalizers = np.zeros((len(rows), seq_len), np.float32)
        for packed, known, row in zip(out, normalizers, rows, strict=True):
            at = 0
            for piece in row:
                start = self.starts[piece.document] + piece.first
                packed[at : at + piece.count] = self.array[start : start + piece.count]
                known[at : at + piece.count] = self.normalizers[start : start + piece.count]
                at += piece.count
        return out[..., : self.hidden_size], out[..., self.hidden_size :], normalizers


def _map(path: Path, dtype, shape: tuple[int, ...], filled: int) -> np.memmap:
    """A file as an array that can be written; its first `filled` rows must be there already.

    Writing to a memory map on a full disk kills the process, so room is asked for first.
    """
    path.touch()
    have, row = path.stat().st_size, math.prod(shape[1:]) * np.dtype(dtype).itemsize
    if have < filled * row:
        raise ValueError(f"{path} has {have} bytes, expected {filled * row}; delete {path.parent} to compute it anew.")
    missing, free = shape[0] * row - have, shutil.disk_usage(path.parent).free
    if missing > free:
        raise OSError(errno.ENOSPC, f"{missing / 1e9:.2f} GB are missing for features, {free / 1e9:.2f} GB free", path)
    return np.memmap(path, dtype, "r+", shape=shape)


def _fingerprint(params: nnx.State) -> int:
    """A checksum that tells targets apart: the head of every parameter."""
    crc = 0
    for leaf in jax.tree.leaves(params):
        crc = zlib.crc32(np.asarray(leaf.ravel()[:4096]).tobytes(), crc)
    return crc


def _with(note: dict, documents: TokenStore, first: int, last: int) -> dict:
    """The note, once features of documents first .. last are in: checksums of their tokens and of their lengths."""
    start, end = (int(documents.ends[i - 1]) if i else 0 for i in (first, last))
    crc = zlib.crc32(documents.tokens[start:end].data, note["crc"])
    lengths = zlib.crc32(documents.lengths[first:last].astype(np.int64).data, note["lengths"])
    return {**note, "documents": last, "crc": crc, "lengths": lengths}
