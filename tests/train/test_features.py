"""Hidden states kept on disk against live ones, and what happens to a killed pass."""

import dataclasses
import json
import os
import shutil
import sys
import zlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from flax import nnx

from dspark_jax.sharding import make_mesh
from train import features, precompute, target_pass
from train.config import RunConfig
from train.data import Document, PackedData, Piece, TokenStore, pack
from train.features import SHARD, fingerprint
from train.loop import Trainer
from train.step import target_features
from train.target_pass import cached_features

DRAW = np.random.default_rng(0)
DOCUMENTS = [
    Document(DRAW.integers(37, size=int(n)).astype(np.int32), np.arange(n) >= 2) for n in DRAW.integers(3, 30, size=13)
]
TAPS = (-1, 0)
LIVE = jax.jit(lambda target, batch: target_features(target, batch, TAPS))
ROWS = PackedData(DOCUMENTS, seq_len=32, batch_size=3, seed=0)


def cache(directory, target, documents=DOCUMENTS, taps=TAPS, dtype="bfloat16"):
    run = RunConfig("", features=str(directory), tap_ids=taps, seq_len=32, batch_size=2, features_dtype=dtype)
    return cached_features(run, target, TokenStore.of(documents), make_mesh(devices=jax.devices()[:1]))


def read(store):
    """All that a directory holds, as bytes by document."""
    return [store._read(i).tobytes() for i in range(len(store.documents))]


def shards(directory):
    return sorted(directory.glob("*.array_record"))


@pytest.fixture(scope="module", autouse=True)
def small_shards():
    """Shards of about two documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_pass, "SHARD_BYTES", 4000)
        yield


@pytest.fixture(scope="module")
def filled(tmp_path_factory, tiny_target):
    """Directories of DOCUMENTS, by dtype."""
    directories = {dtype: tmp_path_factory.mktemp(dtype) for dtype in ("bfloat16", "int8")}
    for dtype, directory in directories.items():
        cache(directory, tiny_target, dtype=dtype)
    return directories


@pytest.fixture
def copied(tmp_path, filled):
    """A directory in bfloat16 to change."""
    return shutil.copytree(filled["bfloat16"], tmp_path / "copied")


@pytest.fixture
def no_pass(monkeypatch):
    """Fails where the target runs."""
    monkeypatch.setattr(target_pass, "_tokens", None)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_features_are_the_live_ones_as_precise_as_they_are_stored(filled, tiny_target, no_pass, dtype):
    stored = cache(filled[dtype], tiny_target, dtype=dtype)
    assert len(shards(filled[dtype])) > 2
    for step in (0, 2):
        batch = ROWS.batch(step)
        live = LIVE(tiny_target, jax.tree.map(jnp.asarray, batch))
        real = batch.segments >= 0
        *ours, normalizers = stored.rows(ROWS.pieces(step), 32)
        logits = tiny_target.logits(jnp.asarray(ours[0], jnp.float32))
        np.testing.assert_allclose(normalizers[real], jax.nn.logsumexp(logits, axis=-1)[real], atol=1e-5)
        for mine, theirs in zip(ours, live, strict=True):
            assert mine.dtype == jnp.bfloat16 and mine.shape == theirs.shape and not mine[~real].any()
            a, b = (np.asarray(x, np.float32)[real].reshape(real.sum(), -1, 16) for x in (mine, theirs))
            # Half a unit in bfloat16's last place, in int8 half a step as well; float noise may tip a rounding.
            bound = 2**-8 * np.abs(b) + 1e-5
            if dtype == "int8":
                bound += np.abs(b).max(axis=-1, keepdims=True) / 254
            assert (np.abs(a - b) <= bound).all()


def test_a_killed_pass_goes_on_where_it_stopped(tmp_path, filled, tiny_target, monkeypatch, capsys):
    replace, calls = os.replace, []

    def killed(work, path):
        calls.append(path)
        if len(calls) == 4:  # a note and two shards are there
            raise KeyboardInterrupt
        replace(work, path)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        cache(tmp_path, tiny_target)
    monkeypatch.undo()
    there = shards(tmp_path)
    assert [path.name for path in there] == [path.name for path in shards(filled["bfloat16"])[:2]]
    (tmp_path / f".{there[0].name}.1.part").write_bytes(b"half")
    capsys.readouterr()
    resumed = cache(tmp_path, tiny_target)
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "target features: 13 of 13 documents"
    assert int(said[0].split()[2]) > int(SHARD.fullmatch(there[1].name)[2])
    assert not list(tmp_path.glob(".*.part"))
    same_features(resumed, cache(filled["bfloat16"], tiny_target))
    cache(tmp_path, tiny_target)
    assert not capsys.readouterr().out


def same_features(ours, theirs):
    """Up to rounding: rows that are packed otherwise may round otherwise."""
    for a, b in zip(*(store.rows(ROWS.pieces(0), 32) for store in (ours, theirs)), strict=True):
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=2**-7, atol=1e-5)


def test_a_shard_that_is_gone_and_documents_appended_are_computed(copied, filled, tiny_target, capsys):
    _, gone, *_, last = shards(copied)
    gone.unlink()
    last.unlink()
    there = {path: path.stat().st_mtime_ns for path in shards(copied)}
    grown = cache(copied, tiny_target)
    same_features(grown, cache(filled["bfloat16"], tiny_target))
    after = {path: path.stat().st_mtime_ns for path in shards(copied)}
    assert there.items() < after.items() and after.keys() == {*there, gone, last}


def joined(documents):
    """The same tokens, cut elsewhere."""
    tokens, cut = np.concatenate([documents[0][0], documents[1][0]]), len(documents[0][0]) + 1
    parts = [Document(part, np.arange(len(part)) >= 2) for part in (tokens[:cut], tokens[cut:])]
    return [*parts, *documents[2:]]


@pytest.mark.parametrize(
    "documents",
    [DOCUMENTS[1:], DOCUMENTS[:-1], DOCUMENTS[::-1], joined(DOCUMENTS)],
    ids=["without the first", "without the last", "reordered", "cut elsewhere"],
)
def test_features_of_other_documents_are_refused(filled, tiny_target, documents):
    with pytest.raises(ValueError, match="features of other documents"):
        cache(filled["bfloat16"], tiny_target, documents)


def test_features_of_another_kind_are_refused(filled, tiny_target):
    with pytest.raises(ValueError, match=r"'taps': \(\(-1, 0\), \(-1, 1\)\)"):
        cache(filled["bfloat16"], tiny_target, taps=(-1, 1))
    with pytest.raises(ValueError, match=r"'dtype': \('bfloat16', 'int8'\)"):
        cache(filled["bfloat16"], tiny_target, dtype="int8")
    graph, weights = nnx.split(tiny_target)
    other = nnx.merge(graph, jax.tree.map(lambda x: x * 1.5, weights))
    with pytest.raises(ValueError, match="'target': "):
        cache(filled["bfloat16"], other)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_features_with_more_taps_serve_a_run_with_fewer(filled, tiny_target, no_pass, dtype):
    hidden, taps, normalizers = cache(filled[dtype], tiny_target, dtype=dtype).rows(ROWS.pieces(0), 32)
    for fewer, columns in ((0,), slice(16, 32)), ((), slice(0)):
        found = cache(filled[dtype], tiny_target, taps=fewer, dtype=dtype).rows(ROWS.pieces(0), 32)
        for ours, theirs in zip(found, (hidden, taps[..., columns], normalizers), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_damaged_shards_are_refused(copied, tiny_target, no_pass):
    shard = shards(copied)[0]
    whole = shard.read_bytes()
    os.truncate(shard, len(whole) // 3)
    with pytest.raises(ValueError, match=f"{shard.name} has 0 records, expected 2"):
        cache(copied, tiny_target)
    shard.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    with pytest.raises(ValueError, match=f"{shard.name} is damaged"):
        read(cache(copied, tiny_target))


def test_a_full_disk_is_noticed_before_any_work(tmp_path, tiny_target, no_pass, monkeypatch):
    monkeypatch.setattr(features.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match=r"GB are missing for features, 0\.00 GB free"):
        cache(tmp_path, tiny_target)


def test_a_disk_that_fills_up_is_told(filled, tiny_target):
    store = cache(filled["bfloat16"], tiny_target)
    with pytest.raises(OSError, match=r"cannot write .*\.array_record: write failed"), store.shard(0, 1):
        raise RuntimeError("write failed")


def test_a_document_longer_than_a_row_is_refused(tmp_path, tiny_target):
    with pytest.raises(ValueError, match=r"documents \[0\] are longer"):
        cache(tmp_path, tiny_target, [Document(np.zeros(33, np.int32), np.ones(33, bool))])


def write_by_hand(directory, target, documents):
    """Features of (tokens, supervised) documents in two shards, as docs/training.md describes the directory."""
    rows = [[Piece(i, 0, len(tokens))] for i, (tokens, _) in enumerate(documents)]
    batch = jax.tree.map(jnp.asarray, pack(documents, rows, 128))
    hidden, taps = jax.jit(lambda target, batch: target_features(target, batch, (0, 1)))(target, batch)
    states = np.stack([hidden, *np.split(np.asarray(taps), 2, axis=-1)], axis=2).astype(ml_dtypes.bfloat16)
    logits = states[:, :, 0].astype(np.float32) @ np.asarray(target.head_weight)[: target.config.num_tokens].T
    directory.mkdir()
    note = {"target": fingerprint(target), "hidden_size": 32, "taps": [0, 1], "dtype": "bfloat16"}
    (directory / "note.json").write_text(json.dumps(note))
    for first, last in (0, 5), (5, 12):
        lengths = np.array([len(tokens) for tokens, _ in documents[first:last]], "<i8")
        tokens = np.concatenate([tokens for tokens, _ in documents[first:last]]).astype("<i4")
        crc = zlib.crc32(tokens.tobytes(), zlib.crc32(lengths.tobytes()))
        path = directory / f"{first:09}-{last:09}-{crc:08x}.array_record"
        writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
        for i, n in zip(range(first, last), lengths, strict=True):
            record = np.empty(n, [("normalizer", "<f4"), ("states", ml_dtypes.bfloat16, (3, 32))])
            record["normalizer"] = np.log(np.exp(logits[i, :n]).sum(axis=-1))
            record["states"] = states[i, :n]
            writer.write(record.tobytes())
        writer.close()


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_run_with_cached_features_learns_the_same(tiny_run, tmp_path, disk_target, by_hand, monkeypatch):
    reduced = dataclasses.replace(tiny_run, draft_vocab_size=20, share_targets=by_hand)
    live = Trainer(reduced, disk_target.model)
    run = dataclasses.replace(reduced, out=str(tmp_path / "cached"), cache_features=True)
    if by_hand:
        run = dataclasses.replace(run, cache_features=False, features=str(tmp_path / "by_hand"))
        write_by_hand(tmp_path / "by_hand", disk_target.model, live.data.documents)
        monkeypatch.setattr(target_pass, "_tokens", None)
    cached, told = Trainer(run, disk_target.model).train(until=1), live.train(until=1)
    for name in ("loss", "ce", "l1", "confidence", "tau", "gradient_norm"):
        np.testing.assert_allclose(cached[name], told[name], rtol=1e-2, err_msg=name)


def test_features_are_computed_before_training(tiny_run, disk_target, monkeypatch, capsys):
    command = ["precompute", "configs/tiny.py", "--features", f"{tiny_run.out}/features", "--features-dtype", "int8"]
    options = {"target": tiny_run.target, "data": tiny_run.data[0], "out": tiny_run.out}
    monkeypatch.setattr(sys, "argv", [*command, *(x for k, v in options.items() for x in (f"--{k}", v))])
    precompute.main()
    assert f"tokens of {4 + 3 * (32 + 4)} bytes" in capsys.readouterr().out
    monkeypatch.setattr(target_pass, "_tokens", None)
    run = dataclasses.replace(tiny_run, features=f"{tiny_run.out}/features", features_dtype="int8")
    hidden, taps, _ = Trainer(run, disk_target.model, disk_target.tokenizer)._batch(0).features
    assert hidden.shape == (2, 128, 32) and taps.shape == (2, 128, 64)
