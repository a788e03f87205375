"""Known temperatures and shifts are found, also when positions are censored; those that nothing tells stay 1."""

import dataclasses

import numpy as np
import pytest

from dspark_jax.calibration import fit_scaling, measure
from dspark_jax.calibration.scaling import GRID

TRUE = (1.8, 1.3, 2.2, 0.7)
STEP = GRID[1] / GRID[0]


def assert_recovered(records, true=TRUE, **options):
    found = fit_scaling(records, **options)
    assert not found.warnings
    assert (np.abs(np.log(np.array(found.scaling.temperatures) / true)) < np.log(STEP)).all(), (
        found.scaling.temperatures
    )


@pytest.mark.parametrize("objective", ["ece", "likelihood"])
def test_known_temperatures_are_recovered_within_a_step_of_the_grid(rounds, objective):
    assert_recovered(rounds(60_000), objective=objective)


def test_calibration_error_falls_to_chance_on_unseen_rounds(rounds):
    found, unseen = fit_scaling(rounds(60_000)), rounds(60_000, seed=1)
    before, after = measure(unseen), measure(unseen, found.scaling)
    assert (before.ece > 0.05).all() and (after.ece < 2 * after.chance).all() and (after.ece < 0.01).all()
    assert (after.brier < before.brier).all()
    np.testing.assert_array_equal(after.confidence_auc, before.confidence_auc)


def test_right_confidences_stay_as_they_are(rounds):
    assert_recovered(rounds(60_000, (1.0,) * 4), (1.0,) * 4)


def shifted(records, shifts):
    """Confidences that are too low by these shifts, once divided by `TRUE`."""
    return dataclasses.replace(records, confidence_logits=records.confidence_logits - np.float32(TRUE) * shifts)


SHIFTS = np.array([-0.5, 0.0, 1.2, -1.0], np.float32)


def test_known_temperatures_and_shifts_are_recovered_together(rounds):
    records, unseen = (shifted(rounds(60_000, seed=seed), SHIFTS) for seed in (0, 1))
    found, alone = fit_scaling(records, shifts=True), fit_scaling(records)
    assert found.scaling.temperatures == pytest.approx(TRUE, rel=0.08)
    assert found.scaling.shifts == pytest.approx(SHIFTS.tolist(), abs=0.08) and alone.scaling.shifts == ()
    after = measure(unseen, found.scaling)
    assert (after.ece < 2 * after.chance).all() and measure(unseen, alone.scaling).ece[-1] > 4 * after.ece[-1]
    np.testing.assert_array_equal(after.confidence_auc, measure(unseen).confidence_auc)


def test_shifts_of_censored_positions_are_unbiased(rounds):
    n = 60_000
    found = fit_scaling(shifted(rounds(n, lengths=random_lengths(n)), SHIFTS), shifts=True)
    assert found.scaling.shifts == pytest.approx(SHIFTS.tolist(), abs=0.15)


def test_right_confidences_are_left_alone_when_chance_explains_what_a_fit_gains(rounds):
    fits = [fit_scaling(rounds(4000, (1.0,) * 4, seed=seed), shifts=True).scaling for seed in range(5)]
    untouched = [t == 1 and b == 0 for fit in fits for t, b in zip(fit.temperatures, fit.shifts, strict=True)]
    assert np.mean(untouched) >= 0.8


def test_a_shift_gives_a_head_that_says_nothing_the_mean(rounds):
    records = rounds(3000)
    records.confidence_logits[:, 0] = 0
    found = fit_scaling(records, shifts=True).scaling
    assert 1 / (1 + np.exp(-found.shifts[0])) == pytest.approx(records.survived[:, 0].mean(), abs=1e-3)


def test_positions_hardly_ever_tested_get_no_shift(rounds):
    records = rounds(3000)
    found = fit_scaling(trim(records, np.where(np.arange(3000) < 60, 4, 2)), shifts=True)
    assert found.scaling.temperatures[2:] == (1.0, 1.0) and found.scaling.shifts[2:] == (0.0, 0.0)
    assert found.scaling.temperatures[0] != 1.0


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
    assert fit_scaling(changed).scaling.temperatures[:2] == fit_scaling(records).scaling.temperatures[:2]


def test_positions_hardly_ever_tested_keep_temperature_1_and_say_so(rounds):
    records = rounds(3000)
    lengths = np.where(np.arange(3000) < 60, 4, 2)
    found = fit_scaling(trim(records, lengths))
    assert found.scaling.temperatures[2:] == (1.0, 1.0) and found.scaling.temperatures[0] != 1.0
    assert [w.split(" was")[0] for w in found.warnings] == ["position 3", "position 4"]
    assert fit_scaling(trim(records, lengths), minimum=5).scaling.temperatures[2] != 1.0
    nothing = fit_scaling(trim(records, np.zeros(3000, int)))
    assert nothing.scaling.temperatures == (1.0,) * 4 and "tested in 0 rounds" in nothing.warnings[0]


@pytest.mark.parametrize("value", [np.inf, -np.inf, 0.0])
def test_confidences_that_no_temperature_can_move_keep_temperature_1(rounds, value):
    records = rounds(3000)
    records.confidence_logits[:, 1] = value
    found = fit_scaling(records)
    assert found.scaling.temperatures[1] == 1.0 and "position 2 has saturated" in found.warnings[0]
    everywhere = fit_scaling(dataclasses.replace(records, confidence_logits=np.full((3000, 4), value, np.float32)))
    assert everywhere.scaling.temperatures == (1.0,) * 4


@pytest.mark.parametrize("objective", ["ece", "likelihood"])
def test_a_few_saturated_confidences_do_no_harm(rounds, objective):
    records = rounds(60_000)
    records.confidence_logits[::1000] = np.inf
    records.confidence_logits[1::1000] = -np.inf
    found = fit_scaling(records, objective=objective)
    assert (np.abs(np.log(np.array(found.scaling.temperatures) / TRUE)) < 1.5 * np.log(STEP)).all()


def test_logits_that_say_nothing_end_at_the_end_of_the_grid_and_say_so(rounds):
    records = rounds(3000)
    accepted = np.random.default_rng(0).integers(0, 2, 3000) * 4
    found = fit_scaling(dataclasses.replace(records, accepted=accepted))
    assert GRID[0] <= min(found.scaling.temperatures) and max(found.scaling.temperatures) <= GRID[-1]
    assert any("end of the range" in warning for warning in found.warnings)


def test_no_rounds_and_unknown_objectives_are_refused(rounds):
    with pytest.raises(ValueError, match="no rounds"):
        fit_scaling(rounds(0))
    with pytest.raises(ValueError, match="objective must be one of ece, likelihood"):
        fit_scaling(rounds(10), objective="mse")  # pyright: ignore[reportArgumentType]
