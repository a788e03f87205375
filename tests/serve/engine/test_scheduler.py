"""Who takes part in a step."""

import numpy as np
import pytest

from serve.engine.pages import PagePool
from serve.engine.request import ServeRequest
from serve.engine.scheduler import OutOfPages, Scheduler, Sequence

PAGE, REACH = 4, 3


def scheduler(*sizes: tuple[int, int], slots: int = 3, pages: int = 40, chunk: int = 8) -> Scheduler:
    """With requests of (tokens of prompt, new tokens) that wait."""
    made = Scheduler(PagePool(pages, PAGE, reserved=1), slots, columns=12, chunk=chunk, reach=REACH)
    for i, (n, more) in enumerate(sizes):
        made.waiting.append(Sequence(ServeRequest([i] * n), n + more, None, seed=0))
    return made


def test_prompts_share_a_steps_tokens_in_the_order_they_came():
    s = scheduler((7, 5), (10, 5), (3, 5))
    first, second, third = s.admit()
    step = s.step()
    assert step.starting == [first] and not step.draftable
    assert [step.prefill[q.slot] for q in (first, second, third)] == [6, 2, 0]
    assert step.order[:2].tolist() == [first.slot, second.slot]
    step = s.step()
    assert (step.draftable, step.starting) == ([first], [second])
    assert [step.prefill[q.slot] for q in (first, second, third)] == [0, 7, 1]
    step = s.step()
    assert (step.draftable, step.starting) == ([first, second], [third]) and step.prefill[third.slot] == 1
    assert sorted(step.order.tolist()) == [0, 1, 2]


def test_a_prompt_of_one_token_starts_at_once():
    s = scheduler((1, 2))
    (one,) = s.admit()
    assert s.step().starting == [one]


def test_a_request_is_not_decoded_past_its_limit_however_late_steps_are_read():
    s = scheduler((2, 2))
    (one,) = s.admit()
    assert s.step().starting == [one]
    assert s.step().draftable == [one]
    assert s.step() is None, "two tokens are on their way, and no more are wanted"


def test_pages_grow_ahead_of_what_unread_steps_may_write():
    s = scheduler((4, 30))
    (one,) = s.admit()
    for _ in range(4):
        step = s.step()
        reach = len(one.tokens) + one.ahead * REACH
        held = np.count_nonzero(step.page_indices[one.slot])
        assert held == len(one.pages) >= reach / PAGE


def test_the_last_that_came_gives_way_and_comes_back_first():
    s = scheduler((8, 20), (8, 20), (4, 4), slots=2, pages=8)
    first, second = s.admit()

    def decode(steps: int) -> None:
        for _ in range(steps):
            for q in s.step().decoding:
                q.ahead -= 1
                q.tokens.append(5)

    with pytest.raises(OutOfPages):
        decode(9)
    assert s.preempt() is second
    assert s.waiting[0] is second and second.pages == [] and not second.decoding
    assert s.pool.used == len(first.pages)
    assert s.step().draftable == [first]
    s.leave(first)
    assert s.admit()[0] is second
    assert second.computed >= 8, "what it had computed is found again"
    before = len(second.tokens)
    while second not in (step := s.step()).draftable:
        assert second not in step.starting, "it draws in a drafted round, as it would have"
    assert len(second.tokens) == before


def test_a_request_that_leaves_the_queue_or_a_slot_frees_what_it_holds():
    s = scheduler((9, 5), (9, 5), slots=1)
    first = s.admit()[0]
    second = s.waiting[0]
    s.step()
    s.leave(second)
    assert not s.waiting
    s.leave(first)
    assert s.pool.used == 0 and not s.running
    assert (s.table == 0).all()
    s.leave(first)
