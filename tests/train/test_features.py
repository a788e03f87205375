"""Cached hidden states against live ones, and what happens to a killed pass."""

import dataclasses
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from train import features
from train.data import Document, PackedData
from train.features import FeatureCache
from train.loop import Trainer
from train.step import target_features

DRAW = np.random.default_rng(0)
DOCUMENTS = [
    Document(DRAW.integers(37, size=int(n)).astype(np.int32), np.arange(n) >= 2) for n in DRAW.integers(3, 30, size=13)
]
TAPS = (-1, 0)


def cache(directory, target, documents=DOCUMENTS, taps=TAPS):
    return FeatureCache(directory, target, documents, taps, seq_len=32, rows=2)


def test_cached_features_are_the_live_ones_in_bfloat16(tmp_path, tiny_target):
    data = PackedData(DOCUMENTS, seq_len=32, batch_size=3, seed=0)
    stored = cache(tmp_path, tiny_target)
    run = jax.jit(lambda batch: target_features(tiny_target, batch, TAPS))
    for step in (0, 2):
        batch = data.batch(step)
        live = run(jax.tree.map(jnp.asarray, batch))
        real = batch.segments >= 0
        *features, normalizers = stored.rows(data.pieces(step), 32)
        logits = tiny_target.logits(jnp.asarray(features[0], jnp.float32))
        np.testing.assert_allclose(normalizers[real], jax.nn.logsumexp(logits, axis=-1)[real], atol=1e-5)
        for ours, theirs in zip(features, live, strict=True):
            assert ours.dtype == jnp.bfloat16 and ours.shape == theirs.shape
            # Half a unit in bfloat16's last place, and float noise that may tip a rounding.
            np.testing.assert_allclose(ours[real].astype(np.float32), theirs[real], rtol=2**-8, atol=1e-5)
            assert not ours[~real].any()


def test_a_killed_pass_goes_on_where_it_stopped(tmp_path, tiny_target, monkeypatch, capsys):
    whole = np.array(cache(tmp_path / "whole", tiny_target).array)
    passes = capsys.readouterr().out.splitlines()
    replace, calls = os.replace, []

    def killed(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        replace(*args)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        cache(tmp_path / "killed", tiny_target)
    monkeypatch.undo()
    assert len(capsys.readouterr().out.splitlines()) == 2
    resumed = cache(tmp_path / "killed", tiny_target)
    assert capsys.readouterr().out.splitlines() == passes[2:]
    np.testing.assert_array_equal(resumed.array, whole)
    cache(tmp_path / "killed", tiny_target)
    assert not capsys.readouterr().out


def test_documents_can_be_added(tmp_path, tiny_target, capsys):
    cache(tmp_path / "grown", tiny_target, DOCUMENTS[:6])
    grown = np.array(cache(tmp_path / "grown", tiny_target).array, np.float32)
    whole = np.array(cache(tmp_path / "whole", tiny_target).array, np.float32)
    np.testing.assert_allclose(grown, whole, rtol=2**-7, atol=1e-5)


def joined(documents):
    """The same tokens, cut elsewhere."""
    tokens, cut = np.concatenate([documents[0][0], documents[1][0]]), len(documents[0][0]) + 1
    parts = [Document(part, np.arange(len(part)) >= 2) for part in (tokens[:cut], tokens[cut:])]
    return [*parts, *documents[2:]]


@pytest.mark.parametrize(
    ("documents", "taps"),
    [(DOCUMENTS[1:], TAPS), (DOCUMENTS[::-1], TAPS), (joined(DOCUMENTS), TAPS), (DOCUMENTS, (-1,))],
    ids=["fewer", "reordered", "cut elsewhere", "other taps"],
)
def test_features_of_something_else_are_refused(tmp_path, tiny_target, documents, taps):
    cache(tmp_path, tiny_target)
    with pytest.raises(ValueError, match="other documents or taps"):
        cache(tmp_path, tiny_target, documents, taps)


def test_features_of_another_target_are_refused(tmp_path, tiny_target):
    cache(tmp_path, tiny_target)
    graph, weights = nnx.split(tiny_target)
    other = nnx.merge(graph, jax.tree.map(lambda x: x * 1.5, weights))
    with pytest.raises(ValueError, match="another target"):
        cache(tmp_path, other)


@pytest.mark.parametrize("name", ["features.bf16", "normalizers.f32"])
def test_features_cut_short_are_refused(tmp_path, tiny_target, name):
    cache(tmp_path, tiny_target)
    size = (tmp_path / name).stat().st_size
    os.truncate(tmp_path / name, size // 3)
    with pytest.raises(ValueError, match=f"{name} has {size // 3} bytes, expected {size}"):
        cache(tmp_path, tiny_target)


def test_a_full_disk_is_noticed_before_any_work(tmp_path, tiny_target, monkeypatch):
    monkeypatch.setattr(features.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match=r"GB are missing for features, 0\.00 GB free"):
        cache(tmp_path, tiny_target)


def test_a_document_longer_than_a_row_is_refused(tmp_path, tiny_target):
    with pytest.raises(ValueError, match=r"documents \[0\] are longer"):
        cache(tmp_path, tiny_target, [Document(np.zeros(33, np.int32), np.ones(33, bool))])


@pytest.mark.parametrize("shared", [False, True])
def test_a_run_with_cached_features_learns_the_same(tiny_run, tmp_path, disk_target, shared):
    reduced = dataclasses.replace(tiny_run, draft_vocab_size=20, share_targets=shared)
    live = Trainer(reduced, disk_target.model).train(until=1)
    run = dataclasses.replace(reduced, out=str(tmp_path / "cached"), cache_features=True)
    cached = Trainer(run, disk_target.model).train(until=1)
    for name in ("loss", "ce", "l1", "confidence", "tau", "gradient_norm"):
        np.testing.assert_allclose(cached[name], live[name], rtol=1e-2, err_msg=name)
