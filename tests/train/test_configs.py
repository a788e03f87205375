"""Every file of configs/ is a run, and a run that goes on from another starts where that one exports."""

import runpy
from pathlib import Path

import pytest

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
