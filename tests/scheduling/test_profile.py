"""Measured cost tables: complete, bound to where they were measured, good for generation."""

import dataclasses

import jax.numpy as jnp
import pytest

from dspark_jax import EarlyStop, Gate, Generator, Request
from dspark_jax.cli import main
from dspark_jax.scheduling import load_costs
from dspark_jax.scheduling.profile import environment, profile
from tests.conftest import GOLDENS


def test_command_measures_writes_and_generation_goes_by_it(tmp_path, golden, capsys):
    case, path = golden("qwen3_dspark_markov"), tmp_path / "costs.json"
    directory = GOLDENS / "qwen3_dspark_markov"
    main([
        "profile", "--target", str(directory / "target"), "--drafter", str(directory / "draft"), "--out", str(path),
        "--rows", "2", "--contexts", "60", "--widths", "2", "--repeats", "2", "--warm-up", "1",
    ])  # fmt: skip
    assert "milliseconds a step" in capsys.readouterr().out
    table = load_costs(path, environment(case.target, case.drafter))
    ((context, costs),) = table.contexts
    (stairs,) = costs.stairs
    assert context == 64 and stairs.requests == 2 and stairs.tokens == (2, 4)
    assert 0 < stairs.verify_seconds[0] <= stairs.verify_seconds[1] and stairs.draft_seconds >= 0
    generator = Generator(case.target, case.drafter, policy=Gate(EarlyStop(costs), costs), max_length=64)
    asked = [Request([1, 2], 8), Request([3], 8)]
    plain = Generator(case.target, max_length=64)
    assert [r.tokens for r in generator.generate(asked)] == [r.tokens for r in plain.generate(asked)]


def test_environment_tells_what_costs_depend_on(golden):
    case = golden("qwen3_dspark_markov")
    here = environment(case.target, case.drafter)
    assert "float32" in here["dtype"] and here["block size"] == str(case.drafter.config.block_size)
    assert environment(case.target, case.drafter, 2) != here
    deeper = dataclasses.replace(case.drafter.config, intermediate_size=8)

    class Other:
        config, dtype = deeper, jnp.float32

    assert environment(case.target, Other())["drafter"] != here["drafter"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": (0,)}, "at least 1"),
        ({"widths": (9,)}, "widths within 1.."),
        ({"contexts": (0,)}, "at least 1"),
        ({"repeats": 0}, "at least 1"),
    ],
)
def test_sizes_that_cannot_be_measured_are_refused(golden, options, message):
    case = golden("qwen3_dspark_markov")
    with pytest.raises(ValueError, match=message):
        profile(case.target, case.drafter, **options)
