"""Verification lengths: the worked traces, the optimum, and plain twins of every policy."""

import dataclasses
from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.scheduling import (
    EarlyStop,
    Fixed,
    LaggedCapacity,
    Oracle,
    Outcome,
    Plain,
    Policy,
    Pool,
    Round,
    StepCosts,
    Threshold,
    pool,
)
from tests.scheduling.twins import Case, Curve, Twin, brute_force

R, G = 3, 3
BATCH = 100
TWO = StepCosts.from_steps_per_second({2: 1.0, 3: 0.8, 4: 0.55, 5: 0.5, 6: 0.3})
THREE = StepCosts.from_steps_per_second(
    {3: 1.0, 4: 0.85, 5: 0.7, 6: 0.6, 7: 0.42, 8: 0.3, 9: 0.2, 10: 0.12, 11: 0.07, 12: 0.04}
)


def everyone(r: int, g: int, padded: bool = False) -> Round:
    return Round(jnp.ones(r, bool), jnp.full(r, g), padded)


def survival_of(*confidences: list[float]) -> jax.Array:
    return jnp.cumprod(jnp.array(confidences), axis=1)


@partial(jax.jit, static_argnums=0)
def decide(policy: Policy, survival, round: Round, state):
    return policy.lengths(survival, round, state)


def lengths_of(policy: Policy, survival, padded: bool = False) -> list[int]:
    """Lengths of requests that all run and have room, before the policy has seen any round."""
    state = policy.initial_state(*survival.shape)
    return decide(policy, survival, everyone(*survival.shape, padded), state).tolist()


def admitted(survival: jax.Array, costs: StepCosts) -> tuple[Pool, list[list[int]]]:
    """The pool, and lengths after 0, 1, 2, ... admissions."""
    candidates = jax.jit(pool, static_argnums=2)(survival, everyone(*survival.shape), costs)
    return candidates, jax.jit(jax.vmap(candidates.lengths))(jnp.arange(survival.size + 1)).tolist()


def test_two_requests_of_the_review():
    survival = survival_of([0.9, 0.5], [0.6, 0.6])
    candidates, lengths = admitted(survival, TWO)
    np.testing.assert_allclose(candidates.tau, [2, 2.9, 3.5, 3.95, 4.31], rtol=1e-6)
    np.testing.assert_allclose(candidates.theta, [2, 2.32, 1.925, 1.975, 1.293], rtol=1e-6)
    assert lengths == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]
    for policy in (EarlyStop(TWO), Oracle(TWO)):
        assert lengths_of(policy, survival) == [1, 0]


def test_three_requests_of_the_review():
    survival = survival_of([0.95, 0.85, 0.7], [0.8, 0.55, 0.3], [0.65, 0.25, 0.1])
    candidates, lengths = admitted(survival, THREE)
    np.testing.assert_allclose(candidates.theta[:5], [3, 3.358, 3.331, 3.335, 2.607], atol=1e-3)  # printed rounded
    order = [(1, 1), (1, 2), (2, 1), (3, 1), (1, 3), (2, 2), (3, 2), (2, 3), (3, 3)]
    for (request, position), before, after in zip(order, lengths, lengths[1:], strict=False):
        grown = before.copy()
        grown[request - 1] += 1
        assert after == grown and after[request - 1] == position
    assert lengths_of(EarlyStop(THREE), survival) == [1, 0, 0]


def test_counterexample_of_the_review():
    costs = StepCosts.from_steps_per_second({1: 1.0, 2: 0.5, 3: 0.45})
    for c2, best, theta in ((0.9, 2, 1.134), (0.0, 0, 1.0)):
        survival = survival_of([0.8, c2])
        assert float(jnp.max(admitted(survival, costs)[0].theta)) == pytest.approx(theta)
        assert lengths_of(Oracle(costs), survival) == [best]
        assert lengths_of(EarlyStop(costs), survival) == [0]


def test_ties_go_by_survival_then_position_then_request():
    _, lengths = admitted(jnp.array([[1.0, 1, 0.5], [1, 1, 0.5], [0.5, 0.5, 0.5]]), THREE)
    assert lengths == [
        [0, 0, 0], [1, 0, 0], [1, 1, 0], [2, 1, 0], [2, 2, 0],
        [2, 2, 1], [2, 2, 2], [3, 2, 2], [3, 3, 2], [3, 3, 3],
    ]  # fmt: skip


@partial(jax.jit, static_argnums=0)
def vmapped(rule, *args):
    return jax.vmap(rule)(*args)


def lengths_of_all(rule, case: Case, padded: bool, *more) -> np.ndarray:
    """Lengths [n, r] of rule(survival, round, costs, *more) on every case."""
    return np.asarray(vmapped(rule, case.survival, case.round(padded), Curve(jnp.asarray(case.seconds)), *more))


def early_stop(survival, round, costs):
    return EarlyStop(costs).lengths(survival, round)


def oracle(survival, round, costs):
    return Oracle(costs).lengths(survival, round)


@hypothesis.settings(max_examples=10_000 // BATCH)
@hypothesis.given(st.integers(0, 2**32 - 1))
def test_early_stop_is_the_optimum_if_theta_has_one_peak_and_global_search_always(seed):
    case = Case.random(seed, BATCH, R, G)
    stopped, searched = (lengths_of_all(rule, case, False) for rule in (early_stop, oracle))
    optimum = brute_force(case)
    for i in range(BATCH):
        twin = Twin(case.survival[i], case.running[i], case.room[i], case.seconds[i])
        assert twin.theta(searched[i]) == optimum[i] or twin.requests == 0
        thetas = [twin.theta(lengths) for lengths in twin.admissions()]
        rises = np.diff(thetas) > 0
        one_peak = not rises[np.argmin(rises) :].any() if len(rises) and not rises.all() else True
        if one_peak and twin.requests:
            assert twin.theta(stopped[i]) == optimum[i]
        for lengths in (stopped[i], searched[i]):
            assert all(0 <= n <= twin.limit(r) for r, n in enumerate(lengths))


OPTIONS = [(0, 0.0), (1, 0.0), (2, 0.25), (0, 0.25)]


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize(("floor", "gain"), OPTIONS)
def test_policies_by_cost_equal_their_plain_twins(floor, gain, padded):
    case, past = Case.random(floor, 300, R, G), Case.random(100 + floor, 300, R, G)
    seen = np.random.default_rng(1).random((300, R)) < 0.7

    def lagged(survival, round, costs, old, seen):
        policy = LaggedCapacity(costs, minimum_gain=gain, floor=floor)
        state = dataclasses.replace(policy.initial_state(R, G), old=old, has_old=seen)
        return policy.lengths(survival, round, state)

    rules = {
        "early": lambda s, r, c: EarlyStop(c, gain, floor).lengths(s, r),
        "oracle": lambda s, r, c: Oracle(c, gain, floor).lengths(s, r),
    }
    found = {name: lengths_of_all(rule, case, padded) for name, rule in rules.items()}
    found["lagged"] = lengths_of_all(lagged, case, padded, jnp.asarray(past.survival), jnp.asarray(seen))
    for i in range(len(case)):
        twin = Twin(case.survival[i], case.running[i], case.room[i], case.seconds[i], padded, floor)
        assert found["early"][i].tolist() == twin.early_stop(gain)
        assert found["oracle"][i].tolist() == twin.admissions()[twin.search(gain)]
        known = case.running[i] & seen[i]
        guess = past.survival[i][known].mean(axis=0) if known.any() else 0.8 ** np.arange(1, G + 1)
        expected = np.where(known[:, None], past.survival[i], guess).astype(np.float32)
        assert found["lagged"][i].tolist() == twin.lagged(expected, gain)


POLICIES: list[Policy] = [
    Fixed(), Fixed(0), Fixed(2), Fixed(99), Threshold(0.0), Threshold(0.3), Threshold(1.0), Plain(),
    EarlyStop(THREE), EarlyStop(THREE, floor=1), LaggedCapacity(THREE), LaggedCapacity(THREE, memory=0.5),
]  # fmt: skip


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_lengths_fit_and_never_depend_on_what_is_known_later(policy, padded):
    """Whether draft k is verified may use its request's confidences 1..k, which know x_1..x_{k-1}, and none behind."""
    case, other = Case.random(1, 200, R, G), Case.random(2, 200, R, G)
    round, state = case.round(padded), policy.initial_state(R, G)
    lengths = jax.jit(jax.vmap(lambda survival, round: policy.lengths(survival, round, state)))
    found = np.asarray(lengths(case.survival, round))
    assert (found >= 0).all() and (found <= np.where(case.running, np.minimum(case.room, G), 0)).all()
    widths = policy.widths(R, G)
    assert list(widths) == sorted(set(widths)) and widths[0] >= 1
    assert not padded or found.max() + 1 <= widths[-1] <= G + 1
    for k in range(1, G):
        for request in range(R):
            survival = case.survival.copy()
            survival[:, request, k:] = survival[:, request, k - 1 : k] * other.survival[:, request, k:]
            changed = np.asarray(lengths(survival, round))
            np.testing.assert_array_equal(changed[:, request] >= k, found[:, request] >= k)
    assert hash(policy) == hash(type(policy)(*vars(policy).values()))


def test_fixed_and_threshold_equal_their_plain_twins():
    case = Case.random(5, 200, R, G)
    for policy in POLICIES[:7]:
        found = jax.vmap(policy.lengths)(case.survival, case.round(False))
        for i in range(len(case)):
            for r in range(R):
                limit = Twin(case.survival[i], case.running[i], case.room[i], case.seconds[i]).limit(r)
                if isinstance(policy, Threshold):
                    good = [survival >= policy.survival for survival in case.survival[i, r, :limit]]
                    expected = good.index(False) if False in good else limit
                else:
                    expected = limit if policy.length is None else min(policy.length, limit)
                assert int(found[i, r]) == expected


def outcome(survival) -> Outcome:
    nothing = jnp.zeros(len(survival), jnp.int32)
    return Outcome(jnp.asarray(survival), nothing, nothing)


def test_capacity_is_two_steps_old():
    policy, round = LaggedCapacity(THREE), everyone(1, G)
    high, low = jnp.full((1, G), 0.9), jnp.full((1, G), 0.1)
    state = policy.initial_state(1, G)
    np.testing.assert_allclose(policy.expected(round, state), [[0.8, 0.64, 0.512]], rtol=1e-6)
    state = policy.update(state, round, outcome(high))
    np.testing.assert_allclose(policy.expected(round, state), [[0.8, 0.64, 0.512]], rtol=1e-6)
    state = policy.update(state, round, outcome(low))
    np.testing.assert_array_equal(policy.expected(round, state), high)
    state = policy.update(state, round, outcome(high))
    np.testing.assert_array_equal(policy.expected(round, state), low)
    # A plain round brings nothing new; what the last drafted one brought is two steps old after it.
    state = policy.update(state, round, None)
    np.testing.assert_array_equal(policy.expected(round, state), high)
    state = policy.update(state, round, None)
    np.testing.assert_array_equal(policy.expected(round, state), high)


def test_new_requests_count_as_the_mean_of_the_known():
    policy = LaggedCapacity(THREE)
    state = policy.initial_state(3, G)
    first = Round(jnp.array([True, True, False]), jnp.full(3, G))
    for _ in range(2):
        state = policy.update(state, first, outcome([[0.5] * G, [0.25] * G, [1.0] * G]))
    np.testing.assert_allclose(policy.expected(everyone(3, G), state)[2], [0.375] * G)
    # A row that was not running has learnt nothing, though arrays came along for it.
    assert state.has_old.tolist() == [True, True, False]
    # A request that takes over a row knows nothing of the one before.
    state = policy.renew(state, jnp.array([True, False, False]))
    np.testing.assert_allclose(policy.expected(everyone(3, G), state), [[0.25] * G] * 3)


def test_memory_keeps_a_share_of_what_was_known():
    policy, round = LaggedCapacity(THREE, memory=0.75), everyone(1, 1)
    state = policy.initial_state(1, 1)
    for value in (0.4, 0.8, 0.0, 0.0):
        state = policy.update(state, round, outcome([[value]]))
    assert float(policy.expected(round, state)[0, 0]) == pytest.approx(0.75 * (0.75 * 0.4 + 0.25 * 0.8))


def test_a_flat_table_verifies_everything_and_zero_confidence_nothing():
    flat = StepCosts.from_steps_per_second({16: 10.0})
    survival = survival_of([0.9, 0.5, 0.1], [1.0, 1.0, 0.0])
    for policy in (EarlyStop(flat), LaggedCapacity(flat), Oracle(flat)):
        assert lengths_of(policy, survival) == [3, 2]
        assert lengths_of(policy, 0 * survival) == [0, 0]
        assert lengths_of(policy, survival.at[0, 1].set(jnp.nan)) == [1, 2]


def test_saturated_confidences_fill_the_table_and_no_more():
    survival = jnp.ones((4, 3))
    for last, expected in ((16, [3, 3, 3, 3]), (9, [2, 1, 1, 1]), (4, [0, 0, 0, 0]), (3, [0, 0, 0, 0])):
        costs = StepCosts.from_steps_per_second({n: 1 / (10 + n) for n in range(1, last + 1)})
        for policy in (EarlyStop(costs), LaggedCapacity(costs), EarlyStop(costs, floor=2)):
            assert lengths_of(policy, survival) == expected, (policy, last)


def test_the_staircase_traps_early_stop_but_not_the_capacity():
    costs = StepCosts.from_steps_per_second({1: 1 / 30, 2: 1 / 60, 8: 1 / 70})
    survival = jnp.full((1, 7), 0.9) ** jnp.arange(1, 8)
    assert lengths_of(EarlyStop(costs), survival) == [0]
    assert lengths_of(LaggedCapacity(costs), survival) == [7]


def test_a_promise_to_users_shortens_steps():
    costs = StepCosts.from_steps_per_second({n: 1 / (0.010 + 0.001 * n) for n in range(1, 33)})
    survival = jnp.full((4, 7), 0.99) ** jnp.arange(1, 8)
    assert sum(lengths_of(EarlyStop(costs), survival)) == 28
    # 0.010 + 0.001 * (4 + 6) is the last step within 1 / 50 s.
    assert sum(lengths_of(EarlyStop(costs.with_promise(50.0, 10.0)), survival)) == 6
    # Where plain steps are too long already, only the time beyond them is weighed.
    assert sum(lengths_of(EarlyStop(costs.with_promise(1000.0, 1.0)), survival)) == 28


def test_values_out_of_range_are_refused():
    for make in (
        lambda: Fixed(-1),
        lambda: Threshold(-0.1),
        lambda: Threshold(1.5),
        lambda: EarlyStop(TWO, minimum_gain=-1),
        lambda: EarlyStop(TWO, floor=-1),
        lambda: LaggedCapacity(TWO, memory=1.0),
        lambda: LaggedCapacity(TWO, prior=2.0),
    ):
        with pytest.raises(ValueError, match="must be"):
            make()
