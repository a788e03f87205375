"""Where a generation ends: stop ids, caps, the sequence limit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import Batch, Generator, Request
from dspark_jax.decoding import generate

G = 7
# The counting target answers [.., 3] with 4 | 5 .. 12 | 13 .. 20 | ...: the first token, then blocks of 7 and a bonus.
PROMPT = [9, 3]


@pytest.fixture(scope="module")
def perfect(counter):
    return counter()


def counts(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


@pytest.mark.parametrize("stop", [4, 5, 7, 11, 12, 13, 20])
def test_the_first_stop_id_ends_it_wherever_it_stands_in_a_block(perfect, stop):
    # 4 is the first token; 5, 7, 11 and 12 are slots 1, 3, 7 and the bonus of the first block.
    request = Request(PROMPT, 25, stop_ids=[stop, stop + 1])
    (result,) = perfect.generate([request])
    assert result.tokens == counts(4, stop) and result.finish_reason == "stop"
    assert result.accept_lengths.sum() == len(result.tokens) - 1
    assert (result.accepted == result.scheduled).all(), "a perfect drafter has no draft rejected"
    assert (result.accepted <= result.accept_lengths).all(), "nothing behind the stop id is counted"
    assert [t for part in perfect.stream(request) for t in part] == result.tokens


def test_nothing_behind_a_stop_id_is_in_the_state(perfect):
    batch = Batch(perfect, rows=2, slots=256)
    batch.admit({0: Request(PROMPT, 40, stop_ids=[7]), 1: Request(PROMPT, 20)})
    while batch.running.any():
        batch.step()
    assert batch.result(0).tokens == counts(4, 7) and batch.result(1).tokens == counts(4, 23)
    assert batch.state.length[0] == len(PROMPT) + 4
    assert not batch.state.tokens[0, len(PROMPT) + 4 :].any()


def test_stop_ids_are_the_union_of_the_targets_and_the_requests(perfect):
    def ends(**options):
        (result,) = perfect.generate([Request([20], 20, **options)])
        return result.tokens[-1], result.finish_reason

    assert ends() == (30, "stop")
    assert ends(stop_ids=[25]) == (25, "stop") and ends(stop_ids=(35, 31)) == (30, "stop")
    assert ends(ignore_eos=True) == ((20 + 20) % 37, "length")
    assert ends(ignore_eos=True, stop_ids=[33]) == (33, "stop")


def test_more_stop_ids_than_the_usual_room(perfect):
    batch = Batch(perfect, rows=2, slots=256)
    for row, (prompt, stops) in enumerate((([20], range(21, 36)), ([20], [21]))):
        batch.admit({row: Request(prompt, 20, stop_ids=stops)})
    assert [batch.result(row).finish_reason for row in range(2)] == ["stop", "stop"]


@pytest.mark.parametrize(
    ("cap", "stop", "reason"), [(5, 7, "stop"), (4, 7, "stop"), (3, 7, "length"), (9, 13, "length"), (10, 13, "stop")]
)
def test_stop_and_cap_in_one_block(perfect, cap, stop, reason):
    (result,) = perfect.generate([Request(PROMPT, cap, stop_ids=[stop])])
    assert result.tokens == counts(4, min(stop, 3 + cap)) and result.finish_reason == reason


@pytest.mark.parametrize("cap", [1, 2, 3, G, G + 1, G + 2])
def test_caps_are_met_exactly(perfect, cap):
    (result,) = perfect.generate([Request(PROMPT, cap)])
    assert result.tokens == counts(4, 3 + cap) and result.finish_reason == "length"
    assert result.accept_lengths.sum() == cap - 1
    assert (result.accepted == result.scheduled).all() and (result.accepted + 1 == result.accept_lengths).all()


def test_sequence_limit_is_met_exactly_and_no_slot_is_overwritten(tiny_target, tiny_drafter, tiny_plain, together):
    limit = 256
    drafted = Generator(tiny_target, tiny_drafter, max_length=limit)
    rng = np.random.default_rng(0)
    requests = [Request(rng.integers(0, 37, n).tolist(), 100) for n in range(limit - 8, limit)]
    results = together(drafted, requests)
    for result, reference, request in zip(results, together(tiny_plain, requests), requests, strict=True):
        assert len(request.prompt) + len(result.tokens) == limit and result.finish_reason == "length"
        assert result.tokens == reference.tokens[: len(result.tokens)]
    # Rows that ended first went on writing, dropped or into slots of their own, while others ran.
    state = drafted._state([*requests, *[Request([0], 1)] * 42], limit)
    state = generate._run(drafted._plan, drafted._params, state)
    n, tokens = len(requests), state.tokens[:8, : limit - 1]
    positions = jnp.broadcast_to(jnp.arange(limit - 1), tokens.shape)
    _, _, fresh = jax.jit(tiny_target)(tokens, positions, tiny_target.create_cache(n, limit))
    for got, want in zip(jax.tree.leaves(state.cache), jax.tree.leaves(fresh), strict=True):
        np.testing.assert_allclose(got[:n, :, : limit - 1], want[:, :, : limit - 1], atol=1e-5)
    for n in (limit, limit + 1):
        with pytest.raises(ValueError, match="at most 255 fit"):
            drafted.generate([Request([1] * n, 1)])


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 200])
def test_the_first_token_follows_the_last_of_a_prompt_of_any_length(perfect, length):
    (result,) = perfect.generate([Request([0] * (length - 1) + [9], 12)])
    assert result.tokens == counts(10, 21) and result.accept_lengths.tolist() == [8, 3]
