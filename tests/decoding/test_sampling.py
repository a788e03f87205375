"""The distribution that is sampled: filters, edges, and that drafts are drawn from the q they report."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import Sampling
from dspark_jax.decoding.sampling import distribution, draw
from dspark_jax.decoding.verify import spread

V = 7
LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=V) * 2, jnp.float32)


def law(**setting) -> np.ndarray:
    return np.asarray(distribution(LOGITS[None], Sampling.create(1, **setting)))[0]


def test_every_edge_is_a_distribution_and_off_is_off():
    grid = list(itertools.product((0, 1e-6, 1e-4, 1), (0, 1e-4, 1), (-1, 0, 1, V, V + 1)))
    t, top_p, top_k = (list(column) for column in zip(*grid, strict=True))
    logits = jnp.broadcast_to(LOGITS, (len(grid), V))
    probs = np.asarray(distribution(logits, Sampling.create(len(grid), t, top_k, top_p)))
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-6)
    greedy = np.eye(V)[int(jnp.argmax(LOGITS))]
    plain = np.asarray(jax.nn.softmax(LOGITS))
    for (temperature, p, k), row in zip(grid, probs, strict=True):
        off = temperature == 1 and p == 1 and k != 1
        np.testing.assert_allclose(row, plain if off else greedy, rtol=1e-6, atol=1e-7)


def test_filters_keep_what_they_say():
    plain = np.asarray(jax.nn.softmax(LOGITS))
    order = np.argsort(-plain)
    for k in range(1, V):
        assert set(np.flatnonzero(law(temperature=1, top_k=k))) == set(order[:k])
    for p in (0.05, 0.3, 0.6, 0.9, 0.99):
        count = int(np.searchsorted(np.cumsum(plain[order]), p)) + 1
        assert set(np.flatnonzero(law(temperature=1, top_p=p))) == set(order[:count])
    for p in (0.01, 0.2, 1.0):
        assert set(np.flatnonzero(law(temperature=1, min_p=p))) == set(np.flatnonzero(plain >= p * plain.max()))
    both = law(temperature=1, top_k=4, top_p=0.8)
    kept = plain[order[:4]] / plain[order[:4]].sum()
    assert set(np.flatnonzero(both)) == set(order[: int(np.searchsorted(np.cumsum(kept), 0.8)) + 1])
    np.testing.assert_allclose(both[both > 0], plain[both > 0] / plain[both > 0].sum(), rtol=1e-6)


def test_ties_at_the_edge_of_top_k_are_kept_together_and_padding_is_not():
    logits = jnp.array([[1.0, 2.0, 1.0, 0.0, -jnp.inf, 1.0]])
    kept = np.asarray(distribution(logits, Sampling.create(1, 1.0, top_k=2)))[0] > 0
    assert kept.tolist() == [True, True, True, False, False, True]
    wide = np.asarray(distribution(logits, Sampling.create(1, 1.0, top_k=6 - 1)))[0]
    assert wide[4] == 0 and np.isfinite(wide).all()


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": None},
        {"top_p": -0.01}, {"top_p": 1.01}, {"top_k": -2}, {"top_k": 1.5}, {"top_k": 2**31}, {"min_p": 2},
        {"temperature": [0.1, 0.2, 0.3]},
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        Sampling.create(2, **setting)


def test_drafts_are_drawn_from_the_q_they_report_bit_for_bit():
    n = 4
    sampling = Sampling.create(n, [0.0, 0.7, 1.0, 1.0], [0, 3, 0, 0], [1.0, 1.0, 0.6, 1.0])
    logits = jnp.broadcast_to(LOGITS, (n, V)) + jnp.arange(n)[:, None] * jnp.linspace(-1, 1, V)
    keys = jax.vmap(jax.random.split, in_axes=(0, None))(jax.random.split(jax.random.key(0), n), 20_000)
    drawn, probs = jax.jit(jax.vmap(draw, in_axes=(None, None, 1)))(logits, sampling, keys)
    expected = np.asarray(jax.jit(distribution)(logits, sampling))
    assert (np.asarray(probs) == expected).all()
    counts = np.stack([np.bincount(row, minlength=V) for row in np.asarray(drawn).T])
    np.testing.assert_allclose(counts / 20_000, expected, atol=0.015)
    assert not counts[expected == 0].any()


def test_a_reduced_vocabulary_spreads_over_the_whole():
    q = jnp.array([[[0.2, 0.8]]])
    assert spread(q, jnp.array([1, 3]), 5)[0, 0].tolist() == pytest.approx([0, 0.2, 0, 0.8, 0])
    assert spread(q, None, 2) is q
