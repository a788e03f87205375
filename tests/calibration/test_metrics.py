"""Metrics against values by hand, brute force, and what must hold for any probabilities."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dspark_jax.calibration import Records, Scaling, measure
from dspark_jax.calibration.metrics import (
    area_under_curve,
    brier_score,
    chance_calibration_error,
    expected_calibration_error,
    log_loss,
    reliability,
)

PROBABILITIES = arrays(np.float64, 12, elements=st.floats(0, 1))
OUTCOMES = arrays(np.bool_, 12)
EMPTY = np.zeros(0)


def test_by_hand():
    p, y = np.array([0.1, 0.1, 0.9, 1.0]), np.array([0.0, 1.0, 1.0, 1.0])
    # Bins of a fifth: {0.1, 0.1} is off by 0.4 and {0.9, 1.0} by 0.05, two predictions each.
    assert expected_calibration_error(p, y, bins=5) == pytest.approx((2 * 0.4 + 2 * 0.05) / 4)
    assert brier_score(p, y) == pytest.approx((0.01 + 0.81 + 0.01 + 0) / 4)
    assert log_loss(p, y) == pytest.approx(-(np.log(0.9) + np.log(0.1) + np.log(0.9)) / 4)
    # Pairs (false, true): 0.1 ties with 0.1 and is below 0.9 and 1.0.
    assert area_under_curve(p, y) == pytest.approx(2.5 / 3)
    found = reliability(p, y, bins=5)
    assert found.count.tolist() == [2, 0, 0, 0, 2]
    np.testing.assert_allclose(found.predicted, [0.1, np.nan, np.nan, np.nan, 0.95])
    np.testing.assert_allclose(found.observed, [0.5, np.nan, np.nan, np.nan, 1.0])


@given(PROBABILITIES, OUTCOMES, st.integers(1, 40))
def test_error_is_within_0_and_1_and_that_of_one_bin_is_the_gap_of_means(p, y, bins):
    ece = expected_calibration_error(p, y, bins)
    assert 0 <= ece <= 1
    assert abs(p.mean() - y.mean()) <= ece + 1e-12
    assert expected_calibration_error(p, y, 1) == pytest.approx(abs(p.mean() - y.mean()), abs=1e-12)


@given(OUTCOMES)
def test_predictions_that_are_the_outcomes_have_no_error(y):
    p = y.astype(float)
    assert expected_calibration_error(p, y) == brier_score(p, y) == log_loss(p, y) == chance_calibration_error(p) == 0
    assert expected_calibration_error(1 - p, y) == brier_score(1 - p, y) == 1


@given(arrays(np.int8, 12), OUTCOMES)
def test_auc_is_the_share_of_pairs_in_order_and_only_order_counts(scores, y):
    scores = scores.astype(float)
    auc = area_under_curve(scores, y)
    if y.all() or not y.any():
        assert np.isnan(auc)
        return
    gaps = scores[y][:, None] - scores[~y]
    assert auc == pytest.approx(np.mean((gaps > 0) + 0.5 * (gaps == 0)))
    assert auc == area_under_curve(scores**3 + 5 * scores - 7, y)
    assert auc == pytest.approx(1 - area_under_curve(-scores, y))
    assert auc == area_under_curve(np.where(scores >= 127, np.inf, scores), y)


def test_chance_is_what_perfect_predictions_show():
    random = np.random.default_rng(0)
    p = random.beta(2, 1, 3000)
    errors = [expected_calibration_error(p, random.random(3000) < p) for _ in range(200)]
    assert chance_calibration_error(p) == pytest.approx(np.mean(errors), rel=0.05)


def test_nothing_to_measure_is_nan():
    for value in (
        expected_calibration_error(EMPTY, EMPTY), chance_calibration_error(EMPTY), brier_score(EMPTY, EMPTY),
        log_loss(EMPTY, EMPTY), area_under_curve(EMPTY, EMPTY),
    ):  # fmt: skip
        assert np.isnan(value)


def records(logits, scheduled, accepted) -> Records:
    n = len(scheduled)
    zeros = np.zeros(n, int)
    return Records(np.array(logits, np.float32), np.array(scheduled), np.array(accepted), zeros, zeros, zeros, ("a",))


def test_measures_count_what_was_verified_and_tested():
    found = measure(records([[0, 0, 0]] * 4, scheduled=[3, 3, 1, 0], accepted=[3, 0, 1, 0]))
    assert found.rounds.tolist() == [3, 2, 2] and found.tested.tolist() == [3, 1, 1]
    np.testing.assert_allclose(found.observed, [2 / 3, 1 / 2, 1 / 2])
    np.testing.assert_allclose(found.predicted, [1 / 2, 1 / 4, 1 / 8])
    np.testing.assert_allclose(found.ece, [1 / 6, 1 / 4, 3 / 8])
    assert found.mean_ece == pytest.approx(np.mean([1 / 6, 1 / 4, 3 / 8]))


def test_positions_never_verified_have_no_measures():
    found = measure(records([[1, 1]] * 2, scheduled=[1, 1], accepted=[1, 0]))
    assert found.rounds.tolist() == [2, 0] and np.isnan([found.ece[1], found.auc[1], found.brier[1]]).all()
    assert found.mean_ece == found.ece[0]
    assert np.isnan(measure(records([[1, 1]], scheduled=[0], accepted=[0])).mean_ece)


def test_certain_and_impossible_drafts_are_measured():
    found = measure(records([[np.inf, -np.inf]] * 3, scheduled=[2] * 3, accepted=[1, 1, 2]), Scaling((3.0, 0.2)))
    np.testing.assert_allclose(found.predicted, [1, 0])
    np.testing.assert_allclose(found.ece, [0, 1 / 3])
    assert found.confidence_auc[1] == 0.5
