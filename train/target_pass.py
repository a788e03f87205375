"""The frozen target's pass over a run's documents, shared by all processes: it fills the directory of features."""

from collections.abc import Generator
from contextlib import ExitStack, closing, nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.multihost_utils import process_allgather, sync_global_devices
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax.models.decoder import Decoder
from dspark_jax.sharding import ROWS, row_shards, spread
from train.config import RunConfig
from train.data import Piece, TokenStore, first_fit, pack
from train.data.cache import locked
from train.distributed import is_main
from train.features import FeatureStore, Note, fingerprint, quantized, rounded
from train.losses import position_chunks
from train.step import TokenBatch, target_features

SHARD_BYTES = 1 << 28
"""Of a shard, about; as much work is lost at a kill for each part of the devices, at most."""


def cached_features(run: RunConfig, target: Decoder, documents: TokenStore, mesh: Mesh) -> FeatureStore:
    """Hidden states of a run's documents, computed as far as they are not in its directory.

    All processes of a run must call it and share the work. A run that finds another one at work waits for it. Where
    nothing is missing the target does not run, and nothing is written.

    Raises:
      ValueError: a document longer than a row, or see `FeatureStore`; OSError: the disk has no room.
    """
    if len(long := np.flatnonzero(documents.lengths > run.seq_len)):
        raise ValueError(
            f"documents {long[:5].tolist()} are longer than seq_len {run.seq_len}; raise it or use live features."
        )
    directory = run.features_directory
    with jax.set_mesh(mesh):
        wanted = Note(fingerprint(target), target.config.hidden_size, run.tap_ids, run.features_dtype)
        store = FeatureStore(directory, documents, wanted)
        if not process_allgather(len(store.missing)).any():
            return store
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory / "lock") if is_main() else nullcontext():
            if is_main():
                store.prepare()
            sync_global_devices("features: the directory is this run's")
            store = FeatureStore(directory, documents, wanted)
            _fill(store, run, target, mesh)
    return store


def _fill(store: FeatureStore, run: RunConfig, target: Decoder, mesh: Mesh) -> None:
    """Adds what is missing: devices of the same rows compute shards of their own, and one of them writes these."""
    parts, rows, token = row_shards(mesh), run.batch_size // run.accumulate, store.note.token
    documents, missing = store.documents, store.missing
    tokens = int(documents.lengths[missing].sum())
    shards = store.plan(min(SHARD_BYTES // token.itemsize, -(-tokens // parts)))
    # In the name, so that a process which sees other shards is found out.
    sync_global_devices(f"features: {shards} are missing")
    waiting = []
    for part in range(parts):
        numbers = [i for first, last in shards[part::parts] for i in range(first, last)]
        pieces = [Piece(i, 0, int(documents.lengths[i])) for i in numbers]
        waiting.append(first_fit(pieces, run.seq_len, 1))
    share, done = rows // parts, len(documents) - len(missing)
    graph, params = nnx.split(target)
    options = store.note.taps, store.note.dtype, run.chunk, run.query_chunk, run.scan_layers
    lie = NamedSharding(mesh, P(ROWS))
    with ExitStack() as stack:
        writers: dict[int, Generator[None, np.ndarray, None]] = {}
        for first in range(0, max(map(len, waiting)), share):
            chunk = [(part[first : first + share] + [[]] * share)[:share] for part in waiting]
            batch = pack(documents, [row for part in chunk for row in part], run.seq_len)
            out = _tokens(graph, params, jax.tree.map(lambda x: spread(x, lie), batch), *options)
            for places in zip(*(out[name].addressable_shards for name in token.names or ()), strict=True):
                if places[0].replica_id:
                    continue
                part = (places[0].index[0].start or 0) // share
                if part not in writers:
                    writers[part] = stack.enter_context(closing(_writer(store, shards[part::parts])))
                    next(writers[part])
                stored = np.empty((share, run.seq_len), token)
                for name, place in zip(token.names or (), places, strict=True):
                    stored[name] = place.data
                for row, pieces in zip(stored, chunk[part], strict=True):
                    for document in np.split(row, np.cumsum([piece.count for piece in pieces]))[:-1]:
                        writers[part].send(document)
            done += sum(len(row) for part in chunk for row in part)
            if is_main():
                print(f"target features: {done} of {len(documents)} documents", flush=True)
    sync_global_devices("features: all are written")
    for shard in shards:
        store.add(*shard)


def _writer(store: FeatureStore, shards: list[tuple[int, int]]) -> Generator[None, np.ndarray, None]:
    """Is sent the tokens of every document of the shards, in their order."""
    for first, last in shards:
        with store.shard(first, last) as out:
            for _ in range(first, last):
                out.write((yield).tobytes())
    yield


@partial(
    jax.jit, static_argnames=("graph", "taps", "dtype", "chunk", "query_chunk", "scan_layers"), out_shardings=P(ROWS)
)
def _tokens(
    graph: nnx.GraphDef[Decoder],
    params: nnx.State,
    batch: TokenBatch,
    taps: tuple[int, ...],
    dtype: str,
    chunk: int,
    query_chunk: int,
    scan_layers: bool,
) -> dict[str, jax.Array]:
    """The fields of `Note.token` [b, t, ...] of packed documents."""
    target = nnx.merge(graph, params)
    hidden, tapped = target_features(target, batch, taps, query_chunk, scan_layers)
    states = jnp.concatenate([hidden, tapped], axis=-1).reshape(*hidden.shape[:2], 1 + len(taps), -1)
    if dtype == "int8":
        stored, scales = quantized(states)
        hidden = stored[:, :, 0] * scales[:, :, :1]
    else:
        stored, scales = rounded(states).astype(jnp.bfloat16), jnp.zeros((*hidden.shape[:2], 0))
    # Of the hidden states as they are read again, so that probabilities computed from both add up to one.
    read = rounded(hidden).astype(target.dtype)
    split, join = position_chunks(read.shape[0], read.shape[1], chunk)
    normalizers = jax.lax.map(lambda x: jax.nn.logsumexp(target.logits(x), axis=-1), split(read))
    return {"normalizer": join(normalizers), "scales": scales, "states": stored}
