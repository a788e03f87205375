"""Costs that a server measured are kept, and read where they hold."""

import pytest

from dspark_jax.scheduling import StepCosts
from serve.__main__ import kept

HERE = {"device": "cpu", "programs": "run [1, 2]"}


def test_costs_are_written_once_and_read_where_they_hold(tmp_path):
    path = str(tmp_path / "costs.json")
    first, other = (StepCosts.from_steps_per_second({1: sps, 2: sps / 2}) for sps in (4.0, 8.0))
    assert kept(path, lambda: first, HERE) == first
    assert kept(path, lambda: other, HERE) == first
    with pytest.raises(ValueError, match=r"programs 'run \[1, 2\]', here 'run \[1\]'.*--costs and a new file"):
        kept(path, lambda: first, HERE | {"programs": "run [1]"})


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ('"cpu"', "1e400", "measured elsewhere"),
        ('"context": 192', '"context": 1e400', "cannot convert"),
        ('"environment": {', '"environment": "x", "other": {', "must be an object"),
        ('"contexts": ', '"contexts": ' + "[" * 10**5, "not whole JSON"),
    ],
)
def test_a_broken_file_is_told_of(tmp_path, was, now, says):
    path = tmp_path / "costs.json"
    kept(str(path), lambda: StepCosts.from_steps_per_second({1: 4.0}), HERE)
    assert was in path.read_text()
    path.write_text(path.read_text().replace(was, now))
    with pytest.raises(ValueError, match=says):
        kept(str(path), lambda: StepCosts.from_steps_per_second({1: 4.0}), HERE)
