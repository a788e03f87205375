"""Drift: temperatures at home and abroad, and what wrong ones cost a scheduler."""

import numpy as np
import pytest

from dspark_jax.calibration import Scheduler, join, measure_drift
from dspark_jax.calibration.drift import throughput

SPS = 1 / (1 + 0.05 * np.arange(60))


def best_lengths(survival: np.ndarray) -> np.ndarray:
    """The prefixes of largest expected tokens a second among all that a descending order of survival gives."""
    r, g = survival.shape
    order = np.argsort(-survival, axis=None, kind="stable")
    tokens = r + np.concatenate([[0], np.cumsum(survival.ravel()[order])])
    count = int(np.argmax(tokens * SPS[r : r + r * g + 1]))
    return np.bincount(order[:count] // g, minlength=r)


@pytest.fixture(scope="module")
def three_domains(rounds):
    mixes = {"math": (1.0,) * 4, "code": (1.5,) * 4, "chat": (3.0,) * 4}
    means = {"math": 2.0, "code": 1.0, "chat": -0.5}
    return join([rounds(8000, t, i, domain=d, mean=means[d]) for i, (d, t) in enumerate(mixes.items())])


def test_temperatures_are_best_at_home(three_domains):
    found = measure_drift(three_domains, scheduler=Scheduler(best_lengths, SPS, requests=4))
    assert found.fitted_on == (
        "no fit", "math", "code", "chat", "all but math", "all but code", "all but chat", "all domains",
    )  # fmt: skip
    assert found.measured_on == ("math", "code", "chat")
    assert found.ece.shape == (8, 3) and len(found.scalings) == 8
    assert found.scalings[0] is None
    home = np.diag(found.ece[1:4])
    assert (home <= found.ece.min(0) + 0.005).all() and (home < 0.03).all()
    assert found.ece[1, 2] > 0.05 and found.ece[3, 0] > 0.1, (
        "the temperatures of math do not know how over-confident chat is"
    )
    assert found.loss is not None
    np.testing.assert_allclose(np.diag(found.loss[1:4]), 0, atol=1e-12)
    assert found.loss[1, 2] > 0.01 and found.loss.min() > -0.01


def test_two_domains_have_no_mix_but_themselves_and_all(rounds):
    records = join([rounds(2000, seed=1, domain="a"), rounds(2000, seed=2, domain="b")])
    found = measure_drift(records)
    assert found.fitted_on == ("no fit", "a", "b", "all domains") and found.throughput is None and found.loss is None


def test_drift_needs_two_domains(rounds):
    with pytest.raises(ValueError, match="at least two domains"):
        measure_drift(rounds(100))


def test_throughput_by_hand(rounds):
    records = rounds(400)
    whole = Scheduler(lambda s: np.full(len(s), 4), np.full(41, 2.0), requests=8)
    assert throughput(records, None, whole) == pytest.approx(2 * 8 * (1 + records.accepted.mean()))
    none = Scheduler(lambda s: np.zeros(len(s), int), np.arange(41.0), requests=8)
    assert throughput(records, None, none) == pytest.approx(8 * 8)


def test_throughput_refuses_what_it_cannot_know(rounds):
    with pytest.raises(ValueError, match="100% of the rounds verified less than the whole block of 4"):
        throughput(rounds(400, lengths=np.full(400, 2)), None, Scheduler(best_lengths, SPS, requests=8))
    with pytest.raises(ValueError, match="too few for 8 requests"):
        throughput(rounds(4), None, Scheduler(best_lengths, SPS, requests=8))
    with pytest.raises(ValueError, match="must reach 40 tokens"):
        throughput(rounds(400), None, Scheduler(best_lengths, SPS[:40], requests=8))
