"""Hidden states of the frozen target, computed once and kept on disk, for runs of several epochs on little hardware."""

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from dspark_jax.models.decoder import Decoder
from train.data import Piece, first_fit, pack
from train.step import target_features


class FeatureCache:
    """Final hidden state and taps of every token of every document, in bfloat16, and its logits' normalizer.

    A killed pass goes on where it stopped, and documents appended later are added.
    """

    def __init__(
        self,
        directory: Path,
        target: Decoder,
        documents: Sequence[tuple[np.ndarray, int]],
        tap_ids: tuple[int, ...],
        seq_len: int,
        rows: int,
    ):
        """Fills what is missing, `rows` rows of `seq_len` tokens at a time.

        Raises:
          ValueError: a document longer than a row, or features of other documents or taps in `directory`.
        """
        if long := [i for i, (tokens, _) in enumerate(documents) if len(tokens) > seq_len]:
            raise ValueError(f"documents {long[:5]} are longer than seq_len {seq_len}; raise it or use live features.")
        directory.mkdir(parents=True, exist_ok=True)
        self.hidden_size = target.config.hidden_size
        self.starts = np.cumsum([0, *(len(tokens) for tokens, _ in documents)])
        note = directory / "done.json"
        done = json.loads(note.read_text()) if note.is_file() else _note([], tap_ids)
        have = done["documents"]
        here = _note(documents[:have], tap_ids)
        if done != here:
            raise ValueError(f"{directory} holds features of other documents or taps; delete it to compute them anew.")
        count, mode = int(self.starts[-1]), "r+" if have else "w+"
        shape = (count, (1 + len(tap_ids)) * self.hidden_size)
        self.array = np.memmap(directory / "features.bf16", ml_dtypes.bfloat16, mode, shape=shape)
        self.normalizers = np.memmap(directory / "normalizers.f32", np.float32, mode, shape=count)
        graph, params = nnx.split(target)

        @jax.jit
        def run(params, batch):
            target = nnx.merge(graph, params)
            hidden, taps = target_features(target, batch, tap_ids)
            stored = jnp.concatenate([hidden, taps], axis=-1).astype(jnp.bfloat16)
            # Of the hidden states as they are stored, so that probabilities computed from both add up to one.
            rounded = stored[..., : hidden.shape[-1]].astype(target.dtype)
            normalizers = jax.lax.map(lambda row: jax.nn.logsumexp(target.logits(row), axis=-1), rounded)
            return stored, normalizers

        waiting = first_fit([Piece(i, 0, len(documents[i][0])) for i in range(have, len(documents))], seq_len, 1)
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
            have = chunk[-1][-1].document + 1
            work = note.with_suffix(".tmp")
            work.write_text(json.dumps(_note(documents[:have], tap_ids)))
            os.replace(work, note)
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


def _note(documents: Sequence[tuple[np.ndarray, int]], tap_ids: Sequence[int]) -> dict:
    """What features belong to: the documents' number, tokens and lengths, and the taps."""
    crc = 0
    for tokens, _ in documents:
        crc = zlib.crc32(tokens.tobytes(), crc)
    lengths = zlib.crc32(np.array([len(tokens) for tokens, _ in documents], np.int64).tobytes())
    return {"documents": len(documents), "crc": crc, "lengths": lengths, "taps": list(tap_ids)}
