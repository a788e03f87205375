"""Rounds whose true probabilities are known."""

from collections.abc import Callable

import numpy as np
import pytest

from dspark_jax.calibration import Records

TRUE = (1.8, 1.3, 2.2, 0.7)


def make_rounds(
    n: int, temperatures=TRUE, seed: int = 0, lengths: np.ndarray | None = None, domain: str = "a", mean: float = 1.6
) -> Records:
    """Rounds whose confidences are right once divided by `temperatures`; `lengths` [n] trims them."""
    random = np.random.default_rng(seed)
    g = len(temperatures)
    z = random.normal(mean, 1.5, (n, g))
    accepts = random.random((n, g)) < 1 / (1 + np.exp(-z))
    scheduled = np.full(n, g) if lengths is None else lengths
    accepted = np.minimum(np.cumprod(accepts, axis=1).sum(1), scheduled)
    logits = (z * temperatures).astype(np.float32)
    prompt = seed * 1_000_000 + np.arange(n) // 20
    return Records(logits, scheduled, accepted, prompt, np.zeros(n, int), np.zeros(n), (domain,), "d0")


@pytest.fixture(scope="session")
def rounds() -> Callable[..., Records]:
    """rounds(n, temperatures, seed, lengths, domain): see `make_rounds`."""
    return make_rounds
