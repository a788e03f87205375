"""What is compiled: once for all requests, nothing that calls the host, the same round for streaming."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from dspark_jax import Generator, Request
from dspark_jax.decoding import generate


def test_mixed_requests_never_recompile(tiny):
    tiny.generate([Request([1], 4)])
    before = generate._run._cache_size()
    rng = np.random.default_rng(0)
    for i in range(20):
        options = {
            "temperature": (0, 0.5, 1)[i % 3],
            "top_k": i % 4,
            "top_p": (1, 0.9)[i % 2],
            "min_p": (0, 0.1)[i % 2],
        }
        prompt = rng.integers(0, 37, int(rng.integers(1, 200)))
        request = Request(prompt, int(rng.integers(1, 50)), **options, stop_ids=range(i % 5), seed=(None, i)[i % 2])
        tiny.generate([request])
    assert generate._run._cache_size() == before


def test_a_given_length_is_the_one_cache_size(tiny_target):
    generators = Generator(tiny_target, max_length=300), Generator(tiny_target)
    sizes = [{g._slots([Request([1], n)]) for n in (1, 200, 290)} for g in generators]
    assert sizes == [{320}, {256, 512}]


def test_equal_generators_share_programs(tiny, tiny_target, tiny_drafter):
    tiny.generate([Request([1], 4)])
    before = generate._run._cache_size()
    Generator(tiny_target, tiny_drafter).generate([Request([2, 3], 4)])
    assert generate._run._cache_size() == before


@pytest.mark.parametrize("name", ["tiny", "tiny_plain"])
def test_the_loop_never_calls_the_host(request, name):
    generator = request.getfixturevalue(name)
    state = generator._state([Request([1, 2], 8)], 64)
    program = str(jax.make_jaxpr(generate._run, static_argnums=0)(generator._plan, generator._params, state))
    assert "while" in program and "callback" not in program


def test_streaming_gives_the_tokens_of_generate(counter):
    generator = counter(wrong=(5, 9, 10, 20))
    for request in (
        Request([4], 30),
        Request([1, 2, 3], 60, ignore_eos=True),
        Request([2], 25, temperature=2.0, top_k=20, seed=3),
        Request([2], 1),
    ):
        parts = list(generator.stream(request))
        (result,) = generator.generate([request])
        assert [t for part in parts for t in part] == result.tokens
        assert [len(part) for part in parts] == [1, *result.accept_lengths]


def test_modules_import_in_any_order():
    names = ("decoding", "drafters", "scheduling", "decoding.sampling", "drafters.protocol", "models", "")
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name.rstrip('.'))\n" + (
        "    for loaded in [m for m in sys.modules if m.startswith('dspark_jax')]:\n        del sys.modules[loaded]\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *(f"dspark_jax.{n}" for n in names)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
