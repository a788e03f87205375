"""Cost tables: what a step costs in and out of their range, and which files are refused."""

import json

import jax
import numpy as np
import pytest

from dspark_jax.scheduling import CostTable, Stairs, StepCosts, load_costs

HERE = {"device": "cpu", "jax": "0.10.2"}
COSTS = StepCosts((Stairs(1, (1, 2, 4), (10.0, 14.0, 15.0), 3.0), Stairs(4, (4, 16), (18.0, 40.0), 5.0)))


def seconds(costs: StepCosts, requests: int, tokens, drafted: bool = True) -> list[float]:
    return np.asarray(costs.seconds(requests, np.asarray(tokens), drafted)).tolist()


def test_tokens_and_requests_round_up_to_what_is_compiled():
    assert seconds(COSTS, 1, [1, 2, 3, 4], drafted=False) == [10, 14, 15, 15]
    assert seconds(COSTS, 1, [1, 2, 3, 4]) == [13, 17, 18, 18]
    assert seconds(COSTS, 2, [2, 4, 5, 16]) == [23, 23, 45, 45]
    jitted = jax.jit(COSTS.seconds, static_argnums=2)
    assert np.asarray(jitted(3, np.arange(3, 18), False)).tolist() == [18, 18, *[40] * 12, np.inf]


def test_steps_out_of_range_never_run():
    assert seconds(COSTS, 1, [5, 16, 17, 1000]) == [np.inf] * 4
    assert seconds(COSTS, 5, [5, 16]) == [np.inf] * 2
    assert COSTS.max_requests == 4 and COSTS.max_tokens == 16


def test_a_bucket_dearer_than_a_larger_one_is_never_used():
    jagged = StepCosts((Stairs(8, (1, 2, 4, 8), (3.0, 9.0, 5.0, 6.0)),))
    assert seconds(jagged, 1, [1, 2, 3, 4, 8]) == [3, 5, 5, 5, 6]
    assert jagged.widths(1, 7) == (1, 4, 8)


def test_widths_are_where_the_next_token_costs_more():
    assert COSTS.widths(1, 7) == (1, 2, 4)
    assert COSTS.widths(4, 7) == (1, 4)
    assert COSTS.widths(3, 7) == (1, 5)
    one = StepCosts((Stairs(64, (64,), (5.0,)),))
    assert one.widths(8, 7) == (8,) and one.widths(64, 7) == (1,)
    with pytest.raises(ValueError, match=r"up to 4 requests and 16 tokens, got a batch of 5 rows.*--rows 5"):
        COSTS.widths(5, 7)
    with pytest.raises(ValueError, match="batch of 64 rows"):
        StepCosts((Stairs(64, (8,), (5.0,)),)).widths(64, 7)


def test_long_steps_have_a_price_under_a_promise():
    promised = StepCosts((Stairs(1, (1, 2), (0.5, 2.0), 0.5),)).with_promise(user_speed=1.0, price=3.0)
    assert seconds(promised, 1, [1, 2]) == [1.0, 2.5 + 3 * 1.5]
    assert seconds(promised, 1, [1, 2], drafted=False) == [0.5, 2 + 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StepCosts(()), "empty; measure"),
        (lambda: Stairs(1, (), ()), "one or more buckets, got 0"),
        (lambda: Stairs(1, (1, 2), (1.0,)), "got 2 buckets and 1 times"),
        (lambda: Stairs(1, (2, 1), (1.0, 2.0)), "ascend"),
        (lambda: Stairs(0, (1,), (1.0,)), "positive"),
        (lambda: Stairs(1, (1,), (float("nan"),)), "positive and finite"),
        (lambda: Stairs(1, (1,), (-1.0,)), "positive and finite"),
        (lambda: Stairs(1, (1,), (1.0,), -1.0), "draft_seconds"),
        (lambda: StepCosts((COSTS.stairs[1], COSTS.stairs[0])), "ascend, got"),
        (lambda: COSTS.with_promise(-1, 0), "0 or more"),
    ],
)
def test_broken_tables_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_contexts_round_up_and_end():
    longer = StepCosts((Stairs(1, (1,), (20.0,)),))
    table = CostTable(((512, COSTS), (2048, longer)), HERE)
    assert table.at(1) == table.at(512) == COSTS and table.at(513) == table.at() == longer
    with pytest.raises(ValueError, match=r"up to 2048 positions, got 2049.*--contexts 2049"):
        table.at(2049)


def test_files_keep_everything_and_are_bound_to_their_environment(tmp_path):
    path = tmp_path / "costs.json"
    table = CostTable(((512, COSTS), (2048, COSTS)), HERE)
    table.save(path)
    assert load_costs(path, HERE) == load_costs(path) == table
    with pytest.raises(ValueError, match=r"measured elsewhere: device 'cpu', here 'TPU v5e'.*dspark profile"):
        load_costs(path, {**HERE, "device": "TPU v5e"})
    with pytest.raises(ValueError, match="dtype 'unknown', here 'bfloat16'"):
        load_costs(path, {**HERE, "dtype": "bfloat16"})
    with pytest.raises(FileNotFoundError, match="dspark profile --out"):
        load_costs(tmp_path / "missing.json")


def test_others_read_our_files_as_one_curve(tmp_path):
    """The table a server sees that knows steps per second by tokens only: never faster than ours."""
    path = tmp_path / "costs.json"
    CostTable(((512, COSTS),), HERE).save(path)
    data = json.loads(path.read_text())
    assert data["sample_batch_tokens"] == [1, 2, 3, 5] and data["max_batch_tokens"] == 16
    assert data["sample_steps_per_sec"] == pytest.approx([1 / 13, 1 / 17, 1 / 23, 1 / 45])
    del data["contexts"], data["environment"]
    path.write_text(json.dumps(data))
    curve = load_costs(path).at(100_000)
    assert seconds(curve, 1, [1, 2, 3, 5, 16]) == pytest.approx([13, 17, 23, 45, 45])


@pytest.mark.parametrize("probes", [[8, 1, 4], [], [0, 1]])
def test_probes_of_tokens_must_ascend(tmp_path, probes):
    path = tmp_path / "sum.json"
    terms = {"bias_seconds": 0.01, "bs_probes": [1], "alpha_seconds": [0.0], "m_probes": probes}
    path.write_text(json.dumps({**terms, "theta_seconds": [0.1] * len(probes)}))
    with pytest.raises(ValueError, match="m_probes must be positive and ascending"):
        load_costs(path)


def test_sampled_steps_per_second_are_looked_up_downwards(tmp_path):
    path = tmp_path / "sps.json"
    path.write_text(json.dumps({
        "sample_batch_tokens": [4, 8, 16], "sample_steps_per_sec": [10.0, 8.0, 5.0], "max_batch_tokens": 20,
    }))  # fmt: skip
    costs = load_costs(path).at(4096)
    expected = [1 / 10, 1 / 10, 1 / 10, 1 / 8, 1 / 8, 1 / 5, 1 / 5, np.inf]
    assert seconds(costs, 3, [1, 4, 7, 8, 15, 16, 20, 21]) == pytest.approx(expected)
    with pytest.raises(ValueError, match="does not say where it was measured"):
        load_costs(path, HERE)


def test_a_sum_of_terms_is_interpolated_over_tokens(tmp_path):
    path = tmp_path / "sum.json"
    path.write_text(json.dumps({
        "bias_seconds": 1.0, "bs_probes": [2, 4], "alpha_seconds": [0.5, 1.0], "m_probes": [2, 6],
        "theta_seconds": [0.0, 4.0],
    }))  # fmt: skip
    costs = load_costs(path).at()
    assert seconds(costs, 1, [1, 2, 3, 6, 7]) == pytest.approx([1.5, 1.5, 2.5, 5.5, np.inf])
    assert seconds(costs, 4, [4, 5]) == pytest.approx([4.0, 5.0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not whole JSON"),
        ("{}", "no cost table: expected one of contexts"),
        ('{"sample_steps_per_sec": [1.0]}', "lacks 'sample_batch_tokens'"),
        ('{"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1.0], "max_batch_tokens": 2}', "2 buckets and 1"),
        ('{"sample_batch_tokens": [1], "sample_steps_per_sec": [0.0], "max_batch_tokens": 2}', "must be positive"),
        (
            '{"sample_batch_tokens": [4], "sample_steps_per_sec": [1.0], "max_batch_tokens": 2}',
            "up to max_batch_tokens",
        ),
        ('{"contexts": []}', "one or more contexts"),
        ('{"contexts": [{"context": 1, "stairs": []}]}', "empty"),
        ('{"contexts": 3}', "costs.json"),
    ],
)
def test_files_of_other_forms_are_refused(tmp_path, text, message):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_costs(path)
