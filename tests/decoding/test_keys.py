"""Randomness: every draw has a key of its own, and seeds decide."""

from collections import Counter

import jax
import numpy as np

from dspark_jax import Request, Threshold
from dspark_jax.decoding import generate, keys, step, verify


def test_no_key_is_used_twice_and_a_threshold_changes_nothing(monkeypatch, tiny, tiny_plain):
    """Traces every key of whole generations, with a policy that verifies at several widths."""
    seen = Counter()

    def traced(derive):
        def traced_derive(*args):
            derived = derive(*args)
            record = lambda data: seen.update(map(bytes, np.asarray(data).reshape(-1, 2)))  # noqa: E731
            jax.debug.callback(record, jax.random.key_data(derived))
            return derived

        return traced_derive

    for module, name in [(step, "slot_keys"), (verify, "slot_keys"), (step, "slot_key"), (verify, "slot_key")]:
        monkeypatch.setattr(module, name, traced(getattr(keys, name)))
    plan = generate._Plan(tiny._plan.target, tiny._plan.drafter, Threshold(0.3), tiny._plan.block_size)
    run = jax.jit(generate._run.__wrapped__, static_argnames="plan")
    widths = set()
    for seed in (0, 1, 2**32):
        state = run(plan, tiny._params, tiny._state([Request([1, 2, 3], 60, temperature=1.0, seed=seed)], 256))
        widths |= set(np.asarray(state.record.scheduled[0, : state.rounds[0]]).tolist())
    jax.effects_barrier()
    assert len(widths) > 2 and len(seen) > 3 * 60 and max(seen.values()) == 1
    greedy = Request([1, 2, 3], 60)
    state = run(plan, tiny._params, tiny._state([greedy], 256))
    assert np.asarray(state.tokens[0, 3:63]).tolist() == tiny_plain.generate([greedy])[0].tokens


def test_seeds_decide_and_unseeded_copies_differ(tiny, together):
    def request(seed):
        return Request([1, 2, 3], 24, temperature=1.0, seed=seed)

    seeds = [5, np.int64(5), 5 + 2**31, 5 + 2**32, -5, 2**64 - 1, None, None]
    tokens = [r.tokens for r in together(tiny, list(map(request, seeds)))]
    assert tokens[0] == tokens[1]
    assert len(set(map(tuple, tokens))) == len(seeds) - 1
    assert tiny.generate([request(5)])[0].tokens == tokens[0]
