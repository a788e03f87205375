"""Drafters: the released layout, read and written back."""

import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoints import drafter as module
from dspark_jax.checkpoints.drafter import load_drafter, read_drafter_config, save_drafter
from tests.checkpoints.files import assert_same, make_autoregressive, make_drafter, make_target

GOLDENS = ("qwen3_dspark_markov", "qwen3_dspark_rnn", "qwen3_dflash_anchor", "qwen3_eagle3")
MADE = {
    "gated, reduced vocabulary": make_drafter,
    "eagle3, reduced vocabulary": lambda: make_autoregressive("eagle3"),
    "mtp, reduced vocabulary": lambda: make_autoregressive("mtp"),
}


@pytest.fixture(scope="module")
def gated():
    return make_drafter()


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_drafter_is_written_as_it_was_released(golden, tmp_path, name):
    case = golden(name)
    released = case.directory / "draft"
    path = save_drafter(tmp_path / "d", case.drafter, target=case.target)
    ours, theirs = load_file(path / "model.safetensors"), load_file(released / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for key in ours:
        np.testing.assert_array_equal(ours[key], theirs[key], strict=True)
    np.testing.assert_array_equal(theirs["embed_tokens.weight"], case.target.embedding[...])
    np.testing.assert_array_equal(theirs["lm_head.weight"], case.target.head_weight)
    config, reference = (json.loads((p / "config.json").read_text()) for p in (path, released))
    shared = config.keys() & reference.keys() - {"max_window_layers"}
    assert {k: config[k] for k in shared} == {k: reference[k] for k in shared} and len(shared) > 20
    assert_same(load_drafter(path, target=case.target), case.drafter)


@pytest.mark.parametrize("name", [*GOLDENS, *MADE])
@pytest.mark.parametrize("tables", [True, False])
def test_load_export_load_is_the_identity(golden, tmp_path, name, tables):
    case = golden(name) if name in GOLDENS else None
    drafter, target = (case.drafter, case.target) if case else (MADE[name](), make_target())
    target = target if tables else None
    full = load_drafter(save_drafter(tmp_path / "f32", drafter, target=target))
    assert_same(full, drafter)
    half = load_drafter(save_drafter(tmp_path / "bf16", full, target=target, dtype=jnp.bfloat16), dtype=jnp.bfloat16)
    again = load_drafter(save_drafter(tmp_path / "again", half, target=target), dtype=jnp.bfloat16)
    assert_same(again, half)
    np.testing.assert_array_equal(half.fc.weight[...], drafter.fc.weight[...].astype(jnp.bfloat16))
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert ("lm_head.weight" in load_file(tmp_path / "again" / "model.safetensors")) == tables


@pytest.mark.parametrize("changes", [{"mlp_bias": True}, {"qk_norm": False}, {"attention_bias": True}])
def test_shapes_beyond_the_released_ones_survive_writing(tmp_path, changes):
    drafter = make_drafter(**changes)
    assert_same(load_drafter(save_drafter(tmp_path / "d", drafter)), drafter)


def test_reduced_vocabulary_is_written_as_offsets_and_marks(gated, tmp_path):
    tensors = load_file(save_drafter(tmp_path / "d", gated) / "model.safetensors")
    np.testing.assert_array_equal(tensors["d2t"], np.arange(1, 21))  # ids 1, 3, .., 39 of rows 0, 1, .., 19
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), np.arange(1, 40, 2))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"d2t": np.full(20, 21)}, r"maps to id 40, expected ids below 40"),
        ({"d2t": -np.arange(20)}, "must map rows to ascending target ids"),
        ({"d2t": np.arange(20) - 1}, "must map rows to ascending"),
        ({"d2t": np.arange(20.0)}, "must map rows to ascending"),
        ({"d2t": np.zeros(20, np.int64)}, "'d2t' and 't2d' disagree"),
        ({"d2t": np.zeros(1, np.int64)}, r"has shape \(1,\), expected \(20,\)"),
    ],
)
def test_bad_id_map_is_refused(gated, tmp_path, change, says):
    file = save_drafter(tmp_path / "d", gated) / "model.safetensors"
    save_file({**load_file(file), **change}, file)
    with pytest.raises(ValueError, match=rf"model\.safetensors.*{says}"):
        load_drafter(file.parent)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mask_token_id": 40}, "mask_token_id 40 is outside the embedding table of 40 rows"),
        ({"mask_token_id": -1}, "mask_token_id -1 is outside"),
        ({"mask_token_id": None}, r"lacks \['mask_token_id'\]"),
        ({"vocab_size": None}, r"lacks \['vocab_size'\]"),
        ({"target_layer_ids": [0, 1]}, r"within -1\.\.0 for a target of 2 layers"),
        ({"target_layer_ids": [0, -1]}, "strictly increasing"),
        ({"block_size": 0}, r"config\.json: block_size is 0, expected a whole number of at least 1"),
        ({"block_size": 3.0}, r"block_size is 3\.0, expected a whole"),
        ({"num_target_layers": "2"}, "num_target_layers is '2', expected a whole"),
        ({"target_layer_ids": 0}, "target_layer_ids is 0, expected a list"),
        ({"target_layer_ids": ["0"]}, "target_layer_ids is '0', expected a whole"),
        ({"mask_token_id": "39"}, "mask_token_id is '39', expected a whole"),
        ({"markov_rank": "4"}, "markov_rank is '4', expected a whole"),
        ({"draft_vocab_size": -1}, "draft_vocab_size is -1, expected a whole"),
        ({"enable_confidence_head": "yes"}, "enable_confidence_head is 'yes', expected true or false"),
        ({"hidden_size": "16"}, "hidden_size is '16', expected a whole"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None, expected a whole"),
        ({"architectures": 3}, "architectures is 3, expected a list"),
        ({"markov_head_type": "lstm"}, "'lstm' unknown"),
        ({"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM' is not supported"),
        (
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention"]},
            r"sliding window \(8\)",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"markov_rank": 5}, r"markov_w1\.weight' in \S+ has shape \(40, 4\), expected \(40, 5\)"),
        ({"enable_confidence_head": False}, r"unexpected 'confidence_head\.proj\.bias'"),
    ],
)
def test_config_that_cannot_be_right_is_refused(gated, tmp_path, change, says):
    path = save_drafter(tmp_path / "d", gated) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=says):
        load_drafter(path.parent)


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("eagle3", {"ttt_length": 0}, "ttt_length is 0, expected a whole number of at least 1"),
        ("eagle3", {"target_layer_ids": None}, r"lacks \['target_layer_ids'\]"),
        ("eagle3", {"target_layer_ids": [0, 1]}, r"within -1\.\.0 for a target of 2 layers"),
        ("eagle3", {"target_layer_ids": [0]}, r"fc\.weight' in \S+ has shape \(16, 32\), expected \(16, 16\)"),
        ("eagle3", {"draft_num_hidden_layers": 2}, "has 2 layers; expected num_hidden_layers 1"),
        ("eagle3", {"num_hidden_layers": 2}, "has 2 layers; expected num_hidden_layers 1"),
        ("eagle3", {"step_loss_decay": "0.8"}, "step_loss_decay is '0.8', expected a number"),
        ("eagle3", {"architectures": ["Qwen3MTPModel"]}, "expected no taps"),
        ("mtp", {"architectures": ["Qwen3Eagle3Model"]}, r"lacks \['target_layer_ids'\]"),
        ("mtp", {"hidden_act": "gelu"}, "'gelu' is not supported"),
        ("mtp", {"qk_norm": False}, r"unexpected 'mtp\.layers\.0\.self_attn\.k_norm\.weight'"),
    ],
)
def test_autoregressive_config_that_cannot_be_right_is_refused(tmp_path, kind, change, says):
    path = save_drafter(tmp_path / "d", make_autoregressive(kind)) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=says):
        load_drafter(path.parent)


def test_drafter_of_another_target_warns(gated, tmp_path):
    target = make_target()
    path = save_drafter(tmp_path / "d", gated, target=target)
    load_drafter(path, target=target)
    other = make_target()
    other.embedding[...] = other.embedding[...] + 1
    with pytest.warns(UserWarning, match="another target's embedding"):
        load_drafter(path, target=other)


def test_drafter_without_confidence_head_loads(golden):
    assert golden("qwen3_dflash_anchor").drafter.confidence is None
    with pytest.raises(FileNotFoundError, match=r"expected a drafter directory with config\.json"):
        read_drafter_config(golden("smollm2").directory)


def test_a_full_disk_is_told(gated, tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(OSError, match=r"/d could not be written \(No space left on device.*unchanged"):
        save_drafter(tmp_path / "d", gated)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", ["save_file", "second rename"])
@pytest.mark.parametrize("existing", [False, True])
def test_writer_that_dies_leaves_what_was_there(gated, tmp_path, monkeypatch, broken, existing):
    path = tmp_path / "d"
    if existing:
        save_drafter(path, gated)
        (path / "notes.txt").write_text("mine")
    before = {p.name: p.read_bytes() for p in path.iterdir()} if existing else None
    other = make_drafter()
    other.fc.weight[...] = other.fc.weight[...] + 1

    def half(tensors, file, metadata):
        Path(file).write_bytes(b"half")
        raise OSError("disk full")

    def rename(old, new, real=os.rename):
        if Path(new) == path and Path(old).name == "new":
            raise OSError("disk full")
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", half) if broken == "save_file" else patch.setattr(os, "rename", rename)
        with pytest.raises(OSError, match="disk full"):
            save_drafter(path, other)
    assert [p.name for p in tmp_path.iterdir()] == (["d"] if existing else [])
    if existing:
        assert {p.name: p.read_bytes() for p in path.iterdir()} == before


def test_overwriting_replaces_weights_and_keeps_other_files(gated, tmp_path):
    path = tmp_path / "parent" / "d"
    save_drafter(path, gated)
    (path / "model.safetensors.index.json").write_text("{}")  # of a sharded drafter that stood here
    (path / "calibration").mkdir()
    (path / "calibration" / "sts.json").write_text("{}")
    other = make_drafter(draft_vocab_size=0)
    save_drafter(path, other)
    assert_same(load_drafter(path), other)
    assert sorted(p.name for p in path.iterdir()) == ["calibration", "config.json", "model.safetensors"]
    assert (
        path / "calibration" / "sts.json"
    ).exists() and path.stat().st_mode & 0o077 == path.parent.stat().st_mode & 0o077


def test_directory_of_something_else_is_not_overwritten(gated, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds no drafter"):
        save_drafter(tmp_path, gated)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_random_weights_reach_every_parameter(gated):
    """The identity tests would pass on a parameter that is dropped and re-created with its initial zeros."""
    assert all(np.std(v[...]) > 0 or v.size == 1 for _, v in nnx.to_flat_state(nnx.state(gated, nnx.Param)))


def test_files_can_be_read_by_whom_the_umask_allows(gated, tmp_path):
    before = os.umask(0o027)
    try:
        path = save_drafter(tmp_path / "d", gated)
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == {
        "config.json": "0o640",
        "model.safetensors": "0o640",
    }
