"""Verification lengths: prefixes, decided before the token they admit is drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import Fixed, Threshold

G = 7
POLICIES = [Fixed(), Fixed(0), Fixed(3), Fixed(99), Threshold(0.0), Threshold(0.3), Threshold(1.0)]


def confidences(rows: int = 200) -> np.ndarray:
    """Logits, some of them a confidence of exactly 0 or 1."""
    logits = np.random.default_rng(0).normal(2, 2, (rows, G)).astype(np.float32)
    logits[0], logits[1], logits[2, 3] = np.inf, -np.inf, -200
    return logits


def twin(policy, logits: np.ndarray) -> int:
    """The length of one row in plain Python."""
    if isinstance(policy, Fixed):
        return G if policy.length is None else min(policy.length, G)
    survival = np.float32(1)
    for k in range(G):
        survival *= np.asarray(jax.nn.sigmoid(logits[k]))
        if survival < policy.survival:
            return k
    return G


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_lengths_equal_the_plain_twin_and_fit_the_widths(policy):
    logits = confidences()
    lengths = np.asarray(jax.jit(policy.lengths)(logits))
    assert lengths.tolist() == [twin(policy, row) for row in logits]
    widths = policy.widths(G)
    assert list(widths) == sorted(set(widths)) and lengths.min() >= 0 and lengths.max() + 1 <= widths[-1] <= G + 1
    assert hash(policy) == hash(type(policy)(*vars(policy).values()))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_admitting_a_draft_never_depends_on_what_is_known_later(policy):
    """Whether draft k is verified may use confidences 1..k, which know x_1..x_{k-1}, and nothing behind."""
    logits = confidences()
    lengths = np.asarray(policy.lengths(jnp.asarray(logits)))
    for k in range(1, G + 1):
        other = logits.copy()
        other[:, k:] = np.random.default_rng(k).normal(0, 5, other[:, k:].shape)
        np.testing.assert_array_equal(np.asarray(policy.lengths(jnp.asarray(other))) >= k, lengths >= k)


def test_values_out_of_range_are_refused():
    for make in (lambda: Fixed(-1), lambda: Threshold(-0.1), lambda: Threshold(1.5)):
        with pytest.raises(ValueError, match="must be"):
            make()
