"""Every file of configs/ is a run, and a run that goes on from another starts where that one exports."""

import dataclasses
import runpy
import sys
from pathlib import Path

import pytest

from dspark_jax.drafters import DrafterConfig
from dspark_jax.models import TargetConfig, check_taps
from train.__main__ import main
from train.config import RunConfig

QWEN3 = {
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
    "14b": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
}
"""What differs between the config.json of these targets."""
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("[!_]*.py"))


def load(path: Path) -> RunConfig:
    return runpy.run_path(str(path))["run"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_a_run(path):
    run = load(path)
    assert isinstance(run, RunConfig) and run.data
    exports = {f"{load(other).out}/drafter" for other in CONFIGS if other != path}
    assert not run.initial_drafter or run.initial_drafter in exports


def qwen3(size: str) -> TargetConfig:
    shared = {"model_type": "qwen3", "vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 8}
    shared |= {"head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1e6, "eos_token_id": 151645}
    return TargetConfig.from_hf({**shared, **QWEN3[size]})


@pytest.mark.parametrize("path", [path for path in CONFIGS if "_qwen3_" in path.stem], ids=lambda path: path.stem)
def test_a_recipe_for_qwen3_is_the_released_drafter(path):
    kind, _, size = path.stem.split("_")
    run, target = load(path), qwen3(size)
    assert run.target == f"Qwen/Qwen3-{size.upper()}" and kind in run.out and size in run.out
    config = run.drafter(target)
    released = type(config).from_hf(config.to_hf())
    assert released == config
    assert (config.block_size, config.draft_rows, config.hidden_size) == (7, 151936, target.hidden_size)
    check_taps(config.tap_ids, target.num_layers)
    assert len(config.tap_ids) == 5 and config.tap_ids[-1] == target.num_layers - 3
    if isinstance(config, DrafterConfig):
        assert (config.num_layers, config.num_anchors, config.mask_token_id) == (5, 512, 151669)
        assert (config.markov_rank, config.confidence_head) == ((256, True) if kind == "dspark" else (0, False))
    else:
        assert kind == "eagle3" and config.step_decay == 0.8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("num_layers", -1),
        ("block_size", 0),
        ("markov_rank", -1),
        ("draft_vocab_size", -1),
        ("intermediate_size", -1),
        ("attention_chunk", -1),
        ("steps", 0),
    ],
)
def test_sizes_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be at least [01], got {value}"):
        dataclasses.replace(RunConfig(out="x"), **{field: value})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "eagle3", "num_layers": 1}, "markov_rank': 64"),
        ({"kind": "eagle3", "markov_rank": 0}, "num_layers': 2"),
        ({"kind": "mtp", "num_layers": 1, "markov_rank": 0}, r"tap_ids': \(1, 10, 19, 28\)"),
    ],
)
def test_what_an_autoregressive_drafter_lacks_is_refused(fields, says):
    with pytest.raises(ValueError, match=f"drafter cannot have .*{says}.*expected"):
        RunConfig(out="x", **fields)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["learning_rate", "clip"])
def test_rates_that_break_a_run_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be positive and finite"):
        RunConfig(out="x", **{name: value})


def test_queries_that_do_not_divide_a_row_are_refused():
    with pytest.raises(ValueError, match="query_chunk must divide seq_len 512, got 100"):
        RunConfig(out="x", query_chunk=100)


@pytest.mark.parametrize("name", ["", "empty.py", "nowhere.py"])
def test_a_file_that_is_no_run_ends_with_one_line(tmp_path, monkeypatch, capsys, name):
    (tmp_path / "empty.py").write_text("run = 1\n")
    monkeypatch.setattr(sys, "argv", ["train", str(tmp_path / name)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and "is no run" in said
