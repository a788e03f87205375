"""Micro-batches one after another make the update of the whole batch."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.accumulate import accumulated
from train.loop import Trainer

TOLERANCE = 1e-6


def start(tiny_run, target, accumulate):
    """A trainer of the tiny run, a batch's two rows in so many parts."""
    return Trainer(dataclasses.replace(tiny_run, accumulate=accumulate, out=f"{tiny_run.out}-{accumulate}"), target)


def assert_near(a, b):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=TOLERANCE, atol=TOLERANCE), a, b)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("share", [0, 0.1, 0.8])
def test_means_over_labels_are_those_of_the_whole_batch(count, share):
    draw, weights = np.random.default_rng(0), jnp.array([1.0, 0.5, 0.25])
    mask = np.cumprod(draw.random((4, 5, 3)) < share, axis=-1).astype(bool)
    values = draw.random(mask.shape).astype(np.float32) * mask

    def compute(values, mask):
        count, sums = jnp.sum(mask, axis=(0, 1)), jnp.sum(values, axis=(0, 1))
        metrics = {
            "loss": jnp.sum(weights * sums) / (jnp.sum(weights * count) + 1e-6),
            "accept_rate": sums / jnp.maximum(count, 1),
            "tau": 1 + jnp.sum(sums) / jnp.maximum(count[0], 1),
            "confidence_error": jnp.sum(sums) / jnp.maximum(jnp.sum(count), 1),
            "supervised": jnp.sum(count),
        }
        return {"w": metrics["loss"] * jnp.arange(3.0)}, metrics

    gradient, metrics = compute(values, mask)
    mean, means = accumulated(compute, gradient, (values, mask), mask, weights, count)
    assert means.pop("gradient_norm") == pytest.approx(float(optax.tree.norm(gradient)))
    assert_near(mean, gradient)
    assert_near(means, metrics)


@pytest.mark.slow
def test_updates_are_those_of_the_whole_batch(tiny_run, disk_target):
    whole, parts = (start(tiny_run, disk_target.model, n) for n in (1, 2))
    first, rows = whole.state.params, np.array(whole.data.batch(0).supervised)
    # The micro-batches differ in what they have to learn, down to nothing.
    cut, one_empty, empty = rows.copy(), rows.copy(), np.zeros_like(rows)
    cut[1, 40:], one_empty[1] = False, False
    first = jax.tree.map(np.array, first)
    for supervised in (cut, one_empty, empty, rows):
        metrics = []
        for trainer in (whole, parts):
            batch = dataclasses.replace(trainer._batch(0), supervised=supervised)
            trainer.state, found = trainer._step(trainer.state, trainer._frozen, trainer._target, batch)
            metrics.append(found)
        assert metrics[0].keys() == metrics[1].keys()
        assert (metrics[0]["gradient_norm"] > 0) == supervised.any()
        assert_near(*metrics)
        assert_near(whole.state, parts.state)  # with the moments, which are of the gradients
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), whole.state.params, first)
    assert max(jax.tree.leaves(moved)) > 1e-3


def test_rows_that_do_not_divide_are_refused(tiny_run, disk_target):
    with pytest.raises(ValueError, match="batch_size 2 does not divide into 3 micro-batches over the 1 devices"):
        start(tiny_run, disk_target.model, 3)
