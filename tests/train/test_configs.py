"""Every file of configs/ is a run, and a run that goes on from another starts where that one exports."""

import dataclasses
import runpy
import sys
from pathlib import Path

import pytest

from train.__main__ import main
from train.config import RunConfig

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("[!_]*.py"))


def load(path: Path) -> RunConfig:
    return runpy.run_path(str(path))["run"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_a_run(path):
    run = load(path)
    assert isinstance(run, RunConfig) and run.data
    exports = {f"{load(other).out}/drafter" for other in CONFIGS if other != path}
    assert not run.initial_drafter or run.initial_drafter in exports


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("num_layers", -1),
        ("block_size", 0),
        ("markov_rank", -1),
        ("draft_vocab_size", -1),
        ("intermediate_size", -1),
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
        ({"kind": "mtp", "num_layers": 1, "markov_rank": 0, "tap_ids": (), "warm_start": (3,)}, r"warm_start': \(3,\)"),
    ],
)
def test_what_an_autoregressive_drafter_lacks_is_refused(fields, says):
    with pytest.raises(ValueError, match=f"drafter cannot have .*{says}.*expected"):
        RunConfig(out="x", **fields)


@pytest.mark.parametrize("name", ["", "empty.py", "nowhere.py"])
def test_a_file_that_is_no_run_ends_with_one_line(tmp_path, monkeypatch, capsys, name):
    (tmp_path / "empty.py").write_text("run = 1\n")
    monkeypatch.setattr(sys, "argv", ["train", str(tmp_path / name)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and "is no run" in said
