"""Targets against the reference's numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

CASES = ("qwen3_dspark_markov", "qwen3_dspark_rnn", "qwen3_dflash_anchor")
TOLERANCE = {"rtol": 0, "atol": 1e-4}


def run(target, tokens, taps, slots, chunks):
    """Hidden, taps and logits of tokens [b, t] fed in chunks of the given lengths."""
    step = jax.jit(lambda tokens, positions, cache: target(tokens, positions, cache, taps))
    cache = target.create_cache(tokens.shape[0], slots)
    hidden, tapped, start = [], [], 0
    for length in chunks:
        positions = jnp.broadcast_to(jnp.arange(start, start + length), (tokens.shape[0], length))
        h, t, cache = step(tokens[:, start : start + length], positions, cache)
        hidden.append(h), tapped.append(t)
        start += length
    hidden = jnp.concatenate(hidden, axis=1)
    return hidden, jnp.concatenate(tapped, axis=1), target.logits(hidden)


@pytest.mark.parametrize("name", CASES)
def test_target_equals_the_reference_in_one_pass_and_in_chunks(golden, name):
    case = golden(name)
    tokens = jnp.asarray(case.expected["train.input_ids"])
    for slots, chunks in ((40, [40]), (48, [1, 16, 16, 1, 1, 1, 1, 1, 1, 1])):
        hidden, taps, logits = run(case.target, tokens, case.drafter.config.tap_ids, slots, chunks)
        np.testing.assert_allclose(hidden, case.expected["target.last_hidden"], **TOLERANCE)
        np.testing.assert_allclose(taps, case.expected["target.context_features"], **TOLERANCE)
        np.testing.assert_allclose(logits, case.expected["target.logits"], **TOLERANCE)
