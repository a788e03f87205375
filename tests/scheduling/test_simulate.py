"""The fake machine: repeatable, the paper's load curve, and no load at which drafting loses."""

from itertools import pairwise

import numpy as np
import pytest

from dspark_jax.scheduling import EarlyStop, Fixed, Gate, LaggedCapacity, Oracle, Plain, Stairs, StepCosts, Threshold
from dspark_jax.scheduling.simulate import Blocks, simulate

MATH, CHAT = (0.93, 0.92, 0.92, 0.91, 0.90), (0.75, 0.70, 0.68, 0.65, 0.63)
BLOCKS = Blocks.drawn([MATH, CHAT])
BUCKETS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
# Memory-bound up to 16 tokens, compute-bound from there on; drafting costs little.
COSTS = StepCosts((Stairs(32, BUCKETS, tuple(0.02 * max(1.0, n / 16) + 2e-4 * n for n in BUCKETS), 0.001),))


def test_a_run_repeats_to_the_last_bit():
    first, again = (simulate(Threshold(0.5), COSTS, BLOCKS, rows=8, rounds=60, seed=4) for _ in range(2))
    np.testing.assert_equal(vars(first), vars(again))
    assert simulate(Threshold(0.5), COSTS, BLOCKS, rows=8, rounds=60, seed=5).tokens != first.tokens


def test_plain_decoding_takes_the_time_the_table_says():
    load = simulate(Plain(), COSTS, BLOCKS, rows=8, rounds=50)
    assert load.tokens == 8 * 50 and load.seconds == pytest.approx(50 * COSTS.stairs[0].verify_seconds[4])
    assert (load.budget, load.tau, load.drafted) == (1, 1, 0)


def test_certain_drafts_are_all_accepted_and_recorded_ones_as_they_were():
    certain = Blocks(BLOCKS.confidence[:1], (np.ones_like(BLOCKS.confidence[0]),))
    assert simulate(Fixed(2), COSTS, certain, rows=4, rounds=20).tau == 3
    recorded = Blocks.recorded([np.full((10, 5), 0.5)], [np.full(10, 2)])
    load = simulate(Fixed(), COSTS, recorded, rows=4, rounds=20, answer=1000)
    assert load.tau == 3 and load.budget == 6
    two = Blocks.recorded([np.full((10, 5), 0.5), np.full((3, 5), 0.5)], [np.full(10, 2), np.array([0, 2, 4])])
    assert simulate(Fixed(), COSTS, two, rows=2, rounds=30, answer=1000).tau == pytest.approx(2.9)


def test_the_load_curve_falls_from_long_blocks_to_plain_decoding():
    policy = LaggedCapacity(COSTS)
    loads = {rows: simulate(policy, COSTS, BLOCKS, rows=rows, rounds=80) for rows in (1, 6, 16, 32)}
    budgets = [load.budget for load in loads.values()]
    assert 4 < budgets[0] <= 6 and budgets[-1] < 1.5
    assert all(b < a for a, b in pairwise(budgets)), budgets
    best = {rows: simulate(Oracle(COSTS), COSTS, BLOCKS, rows=rows, rounds=80).throughput for rows in (6, 16)}
    assert all(loads[rows].throughput > 0.97 * best[rows] for rows in best)


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_at_no_load_slower_than_not_drafting(rows):
    """Also with a drafter that boasts and is always wrong, whose confidences alone would draft for ever."""
    gate = Gate(LaggedCapacity(COSTS), COSTS)
    plain = simulate(Plain(), COSTS, BLOCKS, rows=rows, rounds=1000).throughput
    assert simulate(gate, COSTS, BLOCKS, rows=rows, rounds=1000).throughput >= 0.98 * plain
    boaster = Blocks((np.full((64, 5), 0.99),), (np.full((64, 5), 0.02),))
    assert simulate(LaggedCapacity(COSTS), COSTS, boaster, rows=rows, rounds=20).throughput < 0.98 * plain
    assert simulate(gate, COSTS, boaster, rows=rows, rounds=1000).throughput >= 0.98 * plain


def test_requests_arrive_wait_and_leave():
    busy = simulate(EarlyStop(COSTS), COSTS, BLOCKS, rows=4, rounds=300, rate=100.0, answer=16)
    idle = simulate(EarlyStop(COSTS), COSTS, BLOCKS, rows=4, rounds=300, rate=0.5, answer=16)
    assert busy.waits.mean() > 1 > idle.waits.mean() >= 0
    assert idle.throughput == pytest.approx(0.5 * 16, rel=0.3)
    assert len(idle.speeds) == len(idle.drafts) <= len(idle.waits)


def test_a_floor_helps_those_whom_the_search_leaves_out():
    greedy = simulate(LaggedCapacity(COSTS), COSTS, BLOCKS, rows=8, rounds=400, answer=64)
    fair = simulate(LaggedCapacity(COSTS, floor=1), COSTS, BLOCKS, rows=8, rounds=400, answer=64)
    assert fair.drafts.min() > greedy.drafts.min()
    assert 0 < greedy.fairness <= fair.fairness + 0.02 <= 1.02


def test_costs_and_blocks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="batch of 33 rows"):
        simulate(Plain(), COSTS, BLOCKS, rows=33)
    with pytest.raises(ValueError, match="at least 1"):
        simulate(Plain(), COSTS, BLOCKS, rows=0)
    with pytest.raises(ValueError, match="every domain"):
        Blocks((np.ones((4, 3)),), (np.ones((4, 2)),))
