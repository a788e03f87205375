"""Speculation changes nothing: not the tokens, not the caches, not other rows of the batch."""

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import Batch, Fixed, Generator, Request

SLOTS = 256


@dataclass(frozen=True)
class TwoOfThree(Fixed):
    """Drafts in two rounds, not in the third."""

    def initial_state(self, rows, block_size):
        return jnp.zeros((), jnp.int32)

    def drafts(self, round, state):
        return state % 3 < 2

    def update(self, state, round, outcome):
        return state + 1


def prompts(count: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 37, rng.integers(low, high)).tolist() for _ in range(count)]


def test_greedy_equals_plain_greedy_token_for_token(tiny, tiny_plain, together):
    requests = [Request(prompt, 200) for prompt in [[5], *prompts(49, 1, 56)]]
    drafted, plain = together(tiny, requests), together(tiny_plain, requests)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert all(len(r.tokens) == 200 for r in plain)
    accepted = np.concatenate([r.accepted for r in drafted])
    assert 0 < accepted.mean() < 6, "acceptance and rejection should both happen"
    for result in drafted:
        assert result.accept_lengths.sum() == 199 and len(result.scheduled) == len(result.accepted)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_greedy_equals_plain_greedy_for_autoregressive_drafters(
    kind, tiny_target, tiny_autoregressive, tiny_plain, together
):
    requests = [Request(prompt, 60) for prompt in [[5], *prompts(49, 1, 150)]]
    drafted, plain = (
        together(Generator(tiny_target, tiny_autoregressive(kind)), requests),
        together(tiny_plain, requests),
    )
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    accepted = np.concatenate([r.accepted for r in drafted])
    assert 0 < accepted.mean() < 6, "acceptance and rejection should both happen"


def test_greedy_and_sampled_rows_share_a_batch(tiny, tiny_plain, together):
    grid = list(itertools.product((0, 1e-6, 1), (0, 1e-4, 1), (-1, 0, 1, 37, 40, 41)))[:50]
    requests = [Request([3, 1], 12, t, k, p, seed=i) for i, (t, p, k) in enumerate(grid)]
    (greedy,) = tiny_plain.generate([Request([3, 1], 12)])
    drafted = together(tiny, requests)
    free = [request.temperature == 1 and request.top_p == 1 and request.top_k != 1 for request in requests]
    assert any(free)
    for result, chance in zip(drafted, free, strict=True):
        assert len(result.tokens) == 12 and max(result.tokens) < 37
        assert chance or result.tokens == greedy.tokens
    again = together(tiny, requests)
    assert [r.tokens for r in again] == [r.tokens for r in drafted]


def test_sampled_rows_do_not_depend_on_their_batch(tiny, together):
    requests = [Request(p, 30, 0.9, seed=i) for i, p in enumerate(prompts(6, 2, 20))]
    for alone, batched in zip((tiny.generate([r])[0] for r in requests), together(tiny, requests), strict=True):
        assert alone.tokens == batched.tokens
        np.testing.assert_array_equal(alone.accepted, batched.accepted)


@pytest.mark.parametrize("kind", ["dspark", "eagle3", "mtp"])
def test_rows_that_accept_0_3_and_7_keep_the_caches_of_a_fresh_prefill(
    kind, tiny_target, tiny_plain, scripted, together
):
    requests = [Request(prompt, 60) for prompt in prompts(3, 4, 20, seed=1)]
    script, right = np.zeros((3, 96), np.int32), np.array([0, 3, 7])
    for row, result in enumerate(together(tiny_plain, requests)):
        script[row, : len(requests[row].prompt) + 60] = requests[row].prompt + result.tokens
    generator = Generator(tiny_target, scripted(kind, script, right), policy=TwoOfThree())
    batch = Batch(generator, rows=3, slots=SLOTS)
    batch.admit(dict(enumerate(requests)))
    plan = generator._plan

    def says(params, state):
        """What target and drafter say next, with the caches as they are and with fresh ones."""
        models, position = plan.models(params), state.length - 1
        anchor = jnp.take_along_axis(state.tokens, position[:, None], axis=1)
        before = jnp.arange(96)
        fresh = jax.tree.map(jnp.zeros_like, (state.cache, state.draft_cache))
        fresh = state.replace(cache=fresh[0], draft_cache=fresh[1])
        _, fresh = models.run(fresh, state.tokens[:, :96], jnp.where(before < position[:, None], before, -1))
        keys = jnp.broadcast_to(state.keys[:, None], (3, 7))
        for s in (state, fresh):
            arguments = (s.draft_cache, anchor[:, 0], position, s.sampling, keys)
            proposal, _ = models.drafter.propose(models.target, models.draft_head, *arguments)
            hidden, _ = models.run(s, anchor, position[:, None])
            yield models.target.logits(hidden[:, 0])[:, :37], proposal.logits[..., :37]

    following = jax.jit(lambda params, state: tuple(says(params, state)))
    for n in range(1, 6):
        batch.step()
        (logits, drafts), (fresh_logits, fresh_drafts) = following(generator._params, batch.state)
        np.testing.assert_allclose(logits, fresh_logits, rtol=0, atol=1e-5)
        np.testing.assert_allclose(drafts, fresh_drafts, rtol=0, atol=1e-5)
        for row in range(3):
            result = batch.result(row)
            np.testing.assert_array_equal(result.accepted, np.where(np.arange(n) % 3 < 2, right[row], 0))
            assert requests[row].prompt + result.tokens == script[row, : batch.state.length[row]].tolist()


def test_rows_that_join_in_any_order_equal_their_solo_runs(tiny):
    shapes = ((3, 1, 0.0), (17, 5, 1.0), (64, 9, 0.0), (200, 40, 0.8))
    requests = [
        Request(prompts(1, n, n + 1, seed=n)[0], cap, temperature, top_p=0.95, seed=n) for n, cap, temperature in shapes
    ]
    solo = [tiny.generate([request])[0] for request in requests]
    batch = Batch(tiny, rows=4, slots=SLOTS)
    for order in itertools.permutations(range(4)):
        for place, i in enumerate(order):
            batch.admit({place: requests[i]})
            for _ in range(i + 1):
                batch.step()
        while batch.running.any():
            batch.step()
        for place, i in enumerate(order):
            result = batch.result(place)
            assert result.tokens == solo[i].tokens and result.finish_reason == solo[i].finish_reason
            np.testing.assert_array_equal(result.accepted, solo[i].accepted)
