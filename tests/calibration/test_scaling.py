"""Temperatures that are known are found, also when positions are censored; those that nothing tells stay 1."""

import dataclasses

import numpy as np
import pytest

from dspark_jax.calibration import fit_temperatures, measure
from dspark_jax.calibration.scaling import GRID

TRUE = (1.8, 1.3, 2.2, 0.7)
STEP = GRID[1] / GRID[0]


def assert_recovered(records, true=TRUE, **options):
    found = fit_temperatures(records, **options)
    assert not found.warnings
    assert (np.abs(np.log(np.array(found.temperatures) / true)) < np.log(STEP)).all(), found.temperatures


@pytest.mark.parametrize("objective", ["ece", "likelihood"])
def test_known_temperatures_are_recovered_within_a_step_of_the_grid(rounds, objective):
    assert_recovered(rounds(60_000), objective=objective)


def test_calibration_error_falls_to_chance_on_unseen_rounds(rounds):
    found, unseen = fit_temperatures(rounds(60_000)), rounds(60_000, seed=1)
    before, after = measure(unseen), measure(unseen, found.temperatures)
    assert (before.ece > 0.05).all() and (after.ece < 2 * after.chance).all() and (after.ece < 0.01).all()
    assert (after.brier < before.brier).all()
    np.testing.assert_array_equal(after.confidence_auc, before.confidence_auc)


def test_right_confidences_stay_as_they_are(rounds):
    assert_recovered(rounds(60_000, (1.0,) * 4), (1.0,) * 4)


def random_lengths(n):
    return np.random.default_rng(9).integers(0, 5, n)


def by_own_confidence(records):
    """What a policy does: a position is verified while the confidences up to it look good."""
    good = np.cumprod(records.confidence_logits > -0.5, axis=1)
    return np.minimum(good.sum(1), records.scheduled)


def trim(records, lengths):
    return dataclasses.replace(records, scheduled=lengths, accepted=np.minimum(records.accepted, lengths))


def test_positions_trimmed_at_random_are_censored_and_the_fit_is_unbiased(rounds):
    n = 60_000
    assert_recovered(rounds(n, lengths=random_lengths(n)))


def test_positions_trimmed_by_what_the_policy_may_know_are_censored_and_the_fit_is_unbiased(rounds):
    records = rounds(60_000)
    assert_recovered(trim(records, by_own_confidence(records)))


def test_counting_censored_positions_as_rejections_would_fail(rounds):
    n = 60_000
    records = rounds(n, lengths=random_lengths(n))
    wrong = dataclasses.replace(records, scheduled=np.full(n, 4))
    with pytest.raises(AssertionError):
        assert_recovered(wrong)


def test_counting_positions_behind_a_rejection_only_would_fail(rounds):
    """A round trimmed at l and rejected before it would have failed at every later position too. Counting just those,
    because they are known, keeps failures and drops successes."""
    n = 60_000
    records = rounds(n, lengths=random_lengths(n))
    rejected = records.accepted < records.scheduled
    wrong = dataclasses.replace(records, scheduled=np.where(rejected, 4, records.scheduled))
    with pytest.raises(AssertionError):
        assert_recovered(wrong)


def test_a_later_position_never_moves_an_earlier_temperature(rounds):
    records = rounds(5000)
    other = records.confidence_logits.copy()
    other[:, 2:] = np.random.default_rng(3).normal(0, 9, other[:, 2:].shape)
    changed = dataclasses.replace(
        records, confidence_logits=other, accepted=np.minimum(records.accepted, 2), scheduled=records.scheduled
    )
    assert fit_temperatures(changed).temperatures[:2] == fit_temperatures(records).temperatures[:2]


def test_positions_hardly_ever_tested_keep_temperature_1_and_say_so(rounds):
    records = rounds(3000)
    lengths = np.where(np.arange(3000) < 60, 4, 2)
    found = fit_temperatures(trim(records, lengths))
    assert found.temperatures[2:] == (1.0, 1.0) and found.temperatures[0] != 1.0
    assert [w.split(" was")[0] for w in found.warnings] == ["position 3", "position 4"]
    assert fit_temperatures(trim(records, lengths), minimum=5).temperatures[2] != 1.0
    nothing = fit_temperatures(trim(records, np.zeros(3000, int)))
    assert nothing.temperatures == (1.0,) * 4 and "tested in 0 rounds" in nothing.warnings[0]


@pytest.mark.parametrize("value", [np.inf, -np.inf, 0.0])
def test_confidences_that_no_temperature_can_move_keep_temperature_1(rounds, value):
    records = rounds(3000)
    records.confidence_logits[:, 1] = value
    found = fit_temperatures(records)
    assert found.temperatures[1] == 1.0 and "position 2 has saturated" in found.warnings[0]
    everywhere = fit_temperatures(dataclasses.replace(records, confidence_logits=np.full((3000, 4), value, np.float32)))
    assert everywhere.temperatures == (1.0,) * 4


@pytest.mark.parametrize("objective", ["ece", "likelihood"])
def test_a_few_saturated_confidences_do_no_harm(rounds, objective):
    records = rounds(60_000)
    records.confidence_logits[::1000] = np.inf
    records.confidence_logits[1::1000] = -np.inf
    found = fit_temperatures(records, objective=objective)
    assert (np.abs(np.log(np.array(found.temperatures) / TRUE)) < 1.5 * np.log(STEP)).all()


def test_logits_that_say_nothing_end_at_the_end_of_the_grid_and_say_so(rounds):
    records = rounds(3000)
    accepted = np.random.default_rng(0).integers(0, 2, 3000) * 4
    found = fit_temperatures(dataclasses.replace(records, accepted=accepted))
    assert GRID[0] <= min(found.temperatures) and max(found.temperatures) <= GRID[-1]
    assert any("end of the range" in warning for warning in found.warnings)


def test_no_rounds_and_unknown_objectives_are_refused(rounds):
    with pytest.raises(ValueError, match="no rounds"):
        fit_temperatures(rounds(0))
    with pytest.raises(ValueError, match="objective must be one of ece, likelihood"):
        fit_temperatures(rounds(10), objective="mse")  # pyright: ignore[reportArgumentType]
