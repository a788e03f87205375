"""What is refused, and what runs with a hint."""

import dataclasses
import logging

import numpy as np
import pytest
from flax import nnx

from dspark_jax import Batch, DSpark, Generator, Request, check_pair, generate, speculative_generate


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([]), "the prompt is empty"),
        (Request(3), "one list of token ids"),
        (Request("abc"), "one list of token ids"),
        (Request([[1, 2]]), "one list of token ids"),
        (Request([1.0, 2.0]), "encode text"),
        (Request([1, 40]), "within 0..39"),
        (Request([-1]), "within 0..39"),
        (Request([1], 0), "max_tokens"),
        (Request([1], -3), "max_tokens"),
        (Request([1], 2.5), "max_tokens"),
        (Request([1], None), "max_tokens must be a whole number of at least 1, got None"),
        (Request([1], "5"), "max_tokens must be a whole number of at least 1, got '5'"),
        (Request([1], stop_ids=[7.9]), r"stop_ids must be a list of token ids within 0\.\.39, got \[7\.9\]"),
        (Request([1], stop_ids=[None]), "stop_ids must be"),
        (Request([1], stop_ids=None), "stop_ids must be"),
        (Request([1], stop_ids=7), "stop_ids must be"),
        (Request([1], stop_ids="7"), "stop_ids must be"),
        (Request([1], stop_ids=[3, 40]), "stop_ids must be"),
        (Request([1], stop_ids=[-1]), "stop_ids must be"),
        (Request([1], stop_ids=[2**40]), "stop_ids must be"),
        (Request([1], temperature=-1.0), "temperature"),
        (Request([1], top_p=2.0), "top_p"),
        (Request([1], top_k=-2), "top_k"),
        (Request([1], seed=1.5), "seed"),
        (Request([1], seed=2**64), "seed"),
        (Request([1] * 8192), "at most 8191 fit"),
    ],
)
def test_bad_requests_are_refused(tiny_plain, request_, message):
    with pytest.raises(ValueError, match=message):
        tiny_plain.generate([request_])
    with pytest.raises(ValueError, match=message):
        next(tiny_plain.stream(request_))


def test_bad_batches_are_refused(tiny_target, tiny_plain):
    with pytest.raises(ValueError, match="at least one request"):
        generate(tiny_target, [])
    with pytest.raises(ValueError, match="one list of token ids"):
        generate(tiny_target, [1, 2, 3])
    for option in ({"temperature": [0.1] * 3}, {"seed": [1]}, {"max_tokens": np.array([4])}):
        with pytest.raises(ValueError, match="needs one value or one a prompt"):
            speculative_generate(tiny_target, None, [[1], [2]], **option)
    with pytest.raises(ValueError, match="multiple of 64"):
        Batch(tiny_plain, rows=1, slots=100)
    batch = Batch(tiny_plain, rows=2, slots=64)
    for rows, message in (({}, "within 0..1"), ({2: Request([1])}, "within 0..1"), ({0: Request([1] * 64)}, "63 fit")):
        with pytest.raises(ValueError, match=message):
            batch.admit(rows)


def test_numpy_values_are_values(counting_target):
    prompts = np.array([[1, 2], [7, 8]])
    options = {
        "max_tokens": np.array([3, 2]),
        "temperature": np.zeros(2),
        "top_k": np.int64(0),
        "stop_ids": np.array([39]),
        "seed": np.int64(2**40),
    }
    results = generate(counting_target, prompts, **options)
    assert [r.tokens for r in results] == [[3, 4, 5], [9, 10]]
    assert all(type(token) is int for r in results for token in r.tokens)


def drafter_like(drafter: DSpark, **changes) -> DSpark:
    return DSpark(dataclasses.replace(drafter.config, **changes), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 8}, "hidden size 8 of the drafter, 16 of the target"),
        ({"vocab_size": 48}, "vocabulary 48 of the drafter, 40 of the target"),
        ({"num_target_layers": 6}, "target depth 6 of the drafter, 2 of the target"),
        ({"tap_ids": (0, 1)}, "within -1..0 for a target of 2 layers"),
        ({"tap_ids": (0, -1)}, "strictly increasing"),
    ],
)
def test_a_drafter_for_another_target_is_refused(tiny_target, tiny_drafter, changes, message):
    check_pair(tiny_target, tiny_drafter)
    with pytest.raises(ValueError, match=message):
        Generator(tiny_target, drafter_like(tiny_drafter, **changes))


def test_blocks_longer_than_trained_are_refused(tiny_target, tiny_drafter):
    for drafter, size in ((tiny_drafter, 8), (tiny_drafter, -1), (None, 1)):
        with pytest.raises(ValueError, match="what the drafter was trained for"):
            Generator(tiny_target, drafter, block_size=size)
    for length in (1, 10**6):
        with pytest.raises(ValueError, match="max_length"):
            Generator(tiny_target, tiny_drafter, max_length=length)


def test_shorter_blocks_and_none_are_lossless(counter):
    expected = [(5 + i) % 37 for i in range(40)]
    request = Request([4], 40, ignore_eos=True)
    for size, lengths in ((3, [4] * 9 + [3]), (0, [1] * 39)):
        (result,) = counter(block_size=size).generate([request])
        assert result.tokens == expected and result.accept_lengths.tolist() == lengths
        assert len(result.scheduled) == len(result.accepted) == len(lengths)
        assert result.confidence_logits.shape == (len(lengths) if size else 0, size)


def test_a_cap_beyond_all_limits_is_the_limit(tiny_target, together):
    limited = Generator(tiny_target, max_length=64)
    for cap in (2**63 - 1, 10**30, np.int64(2**63 - 1)):
        (result,) = limited.generate([Request([5, 6, 7], cap, ignore_eos=True)])
        assert len(result.tokens) == 61 and result.finish_reason == "length"


def test_confidences_at_the_end_do_not_depend_on_the_cache_size(tiny_target, tiny_drafter):
    generator = Generator(tiny_target, tiny_drafter, block_size=2)
    request = Request(list(range(30)), 34, ignore_eos=True)
    batch = Batch(generator, rows=1, slots=64)
    batch.admit({0: request})
    batch.step(rounds=40)
    alone = generator.generate([request])[0]
    assert batch.result(0).tokens == alone.tokens
    np.testing.assert_allclose(batch.result(0).confidence_logits, alone.confidence_logits, atol=1e-4)


def test_a_useless_drafter_is_hinted_at(counter, caplog):
    request = Request([4], 100, ignore_eos=True)
    with caplog.at_level(logging.WARNING):
        counter(wrong=(4, 5, 6)).generate([request])
        assert not caplog.records
        useless = counter(wrong=range(37))
        assert useless.generate([request])[0].mean_accept_length == 1
        assert "thinking mode" in caplog.records[-1].getMessage() and "1.00 over 98" in caplog.text
        caplog.clear()
        list(useless.stream(request))
        assert len(caplog.records) == 1
