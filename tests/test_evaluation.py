"""Accepted length and conditional acceptance, counted by hand."""

import json

import numpy as np
import pytest

from dspark_jax.decoding.generate import Generation, Generator, Request
from dspark_jax.evaluation import acceptance, generate_many, read_prompts


def generation(accepted, scheduled):
    accepted = np.array(accepted)
    block = np.zeros((len(accepted), 3))
    return Generation([], "length", accepted + 1, accepted, np.array(scheduled), block, block)


def test_acceptance_counts_censored_positions_as_unknown():
    # Position 1: tried in all 4 rounds, kept in 3. Position 2: tried after a kept first in rounds 1 and 3, kept in 1.
    found = acceptance([generation([3, 0], [3, 3]), generation([1, 1], [3, 1])], block_size=3)
    np.testing.assert_allclose(found.conditional, [3 / 4, 1 / 2, 1 / 1])
    assert found.tau == pytest.approx((4 + 1 + 2 + 2) / 4)
    assert found.low <= found.tau <= found.high and found.rounds == 4


def test_acceptance_needs_rounds():
    with pytest.raises(ValueError, match="no rounds"):
        acceptance([generation([], [])], block_size=3)


def test_many_requests_through_few_rows_equal_their_solo_runs(tiny_target):
    generator = Generator(tiny_target)
    requests = [Request([1 + i, 2, 3], max_tokens=3 + i, temperature=0.5 * (i % 2), seed=i) for i in range(5)]
    many = dict(generate_many(generator, requests, rows=2, slots=64, rounds=2))
    assert {i: g.tokens for i, g in many.items()} == {
        i: generator.generate([r])[0].tokens for i, r in enumerate(requests)
    }


def test_no_rows_are_refused(tiny_target):
    with pytest.raises(ValueError, match="rows must be 1 or more, got 0"):
        next(generate_many(Generator(tiny_target), [Request([1])], rows=0, slots=64))


def test_prompts_are_read_with_their_line_on_error(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"turns": ["a", "b"]}) + "\n" + json.dumps({"turns": ["c"]}) + "\n")
    assert read_prompts(path) == ["a", "c"] and read_prompts(path, 1) == ["a"]
    # JSON leaves the line separator U+2028 as it stands.
    path.write_text('{"turns": ["a\u2028b"]}\n\n{"turns": ["é"]}\n\n', encoding="utf-8")
    assert read_prompts(path) == ["a\u2028b", "é"]
    for row in ('{"text": "a"}', '{"turns": "hello"}', '{"turns": []}', '{"turns": [3]}'):
        path.write_text("\n" + row + "\n")
        with pytest.raises(ValueError, match=r"p\.jsonl:2 "):
            read_prompts(path)
