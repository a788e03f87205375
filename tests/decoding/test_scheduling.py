"""Policies inside generation: nothing changes but how fast it comes."""

import numpy as np
import pytest

from dspark_jax import Batch, Generator, Request
from dspark_jax.calibration import Scaling
from dspark_jax.decoding import generate
from dspark_jax.scheduling import EarlyStop, Fixed, Gate, LaggedCapacity, Oracle, Plain, Stairs, StepCosts

CHEAP = StepCosts((Stairs(64, (4, 8, 64, 512), (1.0, 1.1, 1.3, 3.0), 0.1),))
DEAR = StepCosts((Stairs(64, (64, 512), (1.0, 50.0), 9.0),))
POLICIES = [
    Plain(),
    EarlyStop(CHEAP),
    LaggedCapacity(CHEAP, memory=0.5),
    Gate(EarlyStop(CHEAP), CHEAP),
    Gate(LaggedCapacity(DEAR), DEAR),
    Gate(Fixed(), DEAR),
]


def requests(count: int, cap: int, temperature: float = 0.0) -> list[Request]:
    rng = np.random.default_rng(0)
    return [Request(rng.integers(0, 37, rng.integers(1, 40)), cap, temperature, seed=i) for i in range(count)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{type(p).__name__}{POLICIES.index(p)}")
def test_greedy_tokens_are_plain_ones_and_records_add_up(policy, tiny_target, tiny_drafter, tiny_plain):
    generator = Generator(tiny_target, tiny_drafter, policy=policy)
    asked = requests(4, 40)
    for result, plain in zip(generator.generate(asked), tiny_plain.generate(asked), strict=True):
        assert result.tokens == plain.tokens
        assert result.accept_lengths.sum() == 39 and (result.accepted <= result.scheduled).all()
        drafted = result.drafts[:, 0] >= 0
        np.testing.assert_array_equal(np.isnan(result.confidence_logits), np.repeat(~drafted[:, None], 7, axis=1))
        assert not result.scheduled[~drafted].any()
        assert result.drafted().drafts.tolist() == result.drafts[drafted].tolist()
        assert not np.isnan(result.drafted().confidence_logits).any()
        if isinstance(policy, Plain):
            assert not drafted.any()
        if isinstance(policy, Gate) and policy.costs == DEAR:
            assert 0 < drafted.sum() < 5, "rounds after the first few should be plain"


def test_drafting_after_plain_rounds_is_as_good_as_ever(counter):
    """The drafter's context goes on in plain rounds: a perfect drafter's next block is accepted whole."""
    generator = counter(policy=Gate(Fixed(), DEAR, trial_share=0.5))
    (result,) = generator.generate([Request([4], 200, ignore_eos=True)])
    drafted = result.drafts[:, 0] >= 0
    assert 2 < drafted.sum() < len(drafted) / 2
    assert (result.accepted[drafted][:-1] == 7).all()


def test_requests_join_a_batch_whose_policy_remembers(tiny_target, tiny_drafter, tiny_plain):
    generator = Generator(tiny_target, tiny_drafter, policy=Gate(LaggedCapacity(CHEAP), CHEAP))
    batch = Batch(generator, rows=2, slots=128)
    asked = requests(3, 30)
    batch.admit({0: asked[0]})
    for _ in range(4):
        batch.step()
    inner = batch.state.policy.inner
    assert inner.has_old.tolist() == [True, False]
    batch.admit({1: asked[1]})
    while batch.running.any():
        batch.step(4)
    batch.admit({0: asked[2]})
    known = batch.state.policy
    assert known.inner.has_old.tolist() == [False, True] and known.ledgers.rounds.min() > 2
    while batch.running.any():
        batch.step()
    plain = [r.tokens for r in tiny_plain.generate(asked)]
    assert [batch.result(1).tokens, batch.result(0).tokens] == [plain[1], plain[2]]


def test_a_scaling_changes_what_the_policy_sees(tiny_target, tiny_drafter):
    asked = [Request([1, 2, 3], 40)]
    policy = EarlyStop(StepCosts((Stairs(1, (1, 2, 8), (1.0, 1.4, 1.8)),)))
    cold = Generator(tiny_target, tiny_drafter, policy=policy, confidence_scaling=Scaling((1e-3,) * 7))
    warm = Generator(tiny_target, tiny_drafter, policy=policy, confidence_scaling=Scaling((1e3,) * 7))
    (first,), (second,) = cold.generate(asked), warm.generate(asked)
    assert first.tokens == second.tokens
    assert set(second.scheduled.tolist()) <= {0, 1}, "survival is a half, a quarter, ..."
    assert set(first.scheduled.tolist()) != set(second.scheduled.tolist())
    with pytest.raises(ValueError, match="6 temperatures for 7 draft positions"):
        Generator(tiny_target, tiny_drafter, confidence_scaling=Scaling((1.0,) * 6))


def test_a_policy_that_looks_ahead_or_a_table_too_small_is_refused(tiny_target, tiny_drafter):
    with pytest.raises(ValueError, match="Oracle decides on tokens by what they drew"):
        Generator(tiny_target, tiny_drafter, policy=Oracle(CHEAP))
    small = StepCosts((Stairs(1, (8,), (1.0,)),))
    with pytest.raises(ValueError, match="batch of 2 rows"):
        Generator(tiny_target, tiny_drafter, policy=EarlyStop(small)).generate(requests(2, 4))


def test_a_policy_with_memory_compiles_one_program(tiny_target, tiny_drafter):
    generator = Generator(tiny_target, tiny_drafter, policy=Gate(LaggedCapacity(CHEAP), CHEAP))
    generator.generate(requests(2, 10))
    before = generate._run._cache_size()
    for temperature in (0.0, 0.7):
        generator.generate(requests(2, 30, temperature))
    assert generate._run._cache_size() == before
