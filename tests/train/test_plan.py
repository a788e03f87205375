"""Planning for hardware that is not there."""

import dataclasses
import json

import jax
import pytest
from rich.console import Console

from configs import tiny
from dspark_jax.checkpoints.target import load_target_config
from dspark_jax.hlo import Array, Counts
from dspark_jax.models.config import TargetConfig
from dspark_jax.sharding import make_mesh
from train.plan import Plan, logits_at_once, takes_memory, topology

TARGET = TargetConfig.from_hf(tiny.TARGET)
RUN = dataclasses.replace(tiny.run, draft_vocab_size=0)


def test_of_a_target_its_config_is_enough(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.TARGET))
    assert load_target_config(tmp_path) == TARGET
    with pytest.raises(FileNotFoundError):
        load_target_config(tmp_path / "nothing")


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((1, 1, 1), jax.devices()[:1])


@pytest.mark.parametrize("name", ["v3:2x2", "4x4", ""])
def test_a_chip_that_is_not_known_is_refused(name):
    with pytest.raises(ValueError, match="--topology must be a slice of v4, v5e"):
        topology(name)


def test_logits_are_told_from_tables(mesh):
    v, d, r = TARGET.vocab_size, TARGET.hidden_size, RUN.markov_rank
    shapes = ((v, d), (r, v), (1, v, r), (4, v, d // 4), (12, v), (1, 24, v), (v,), (100, d))
    arrays = {Array("f32", shape) for shape in shapes}
    assert logits_at_once(RUN, TARGET, mesh, Counts(arrays=arrays)) == 24
    assert logits_at_once(RUN, TARGET, mesh, Counts(arrays=arrays | {Array("bf16", (d, 2, v))})) == 2 * d


def test_what_takes_most_is_named_first_and_the_knob_makes_it_less(mesh):
    named = {"query_chunk": 16, "attention_chunk": 4, "chunk": 8, "remat": True}
    for knob, value in named.items():
        before, after = (
            {what.split()[-1] if "set" in what else what.split("lower ")[-1]: size for size, what in found}
            for found in (
                takes_memory(run, TARGET, mesh, 1000) for run in (RUN, dataclasses.replace(RUN, **{knob: value}))
            )
        )
        assert after.get(knob, 0) < before[knob], knob
    sizes = [size for size, _ in takes_memory(RUN, TARGET, mesh, 1000)]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.slow
def test_a_step_is_compiled_for_a_slice_that_is_not_there(tiny_directory):
    pytest.importorskip("libtpu")
    console = Console(record=True, width=120)
    run = dataclasses.replace(RUN, target=str(tiny_directory), batch_size=4, chunk=16, mesh=(2, 2, 1))
    assert Plan("v5e:2x2", effort=-1).main(run, console)
    told = console.export_text()
    assert "4 chips as 2 data x 2 fsdp" in told and "[anchors, g, v] is absent" in told
