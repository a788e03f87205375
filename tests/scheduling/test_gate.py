"""Whether to draft at all: closes when drafting costs more than it brings, tries again, opens when that changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.scheduling import EarlyStop, Fixed, Gate, Oracle, Outcome, Plain, Round, Stairs, StepCosts

G = 3
COSTS = StepCosts((Stairs(8, (1, 2, 4, 8, 16, 32), (10.0, 12.0, 13.0, 14.0, 18.0, 30.0), 4.0),))


def play(gate: Gate, accepted: np.ndarray, running: np.ndarray | None = None) -> np.ndarray:
    """Which rounds [t] draft, if round t would accept accepted[t] drafts of each of r requests; accepted is [t, r]."""
    running = np.ones(accepted.shape, bool) if running is None else running

    def body(state, inputs):
        accepted, running = inputs
        round = Round(running, jnp.full(running.shape, G))
        survival = jnp.ones((len(running), G))
        drafts = gate.drafts(round, state)
        outcome = Outcome(survival, gate.lengths(survival, round, state), accepted)
        told = jax.lax.cond(drafts, lambda: gate.update(state, round, outcome), lambda: gate.update(state, round, None))
        return told, drafts

    state = gate.initial_state(accepted.shape[1], G)
    return np.asarray(jax.jit(lambda *x: jax.lax.scan(body, state, x)[1])(jnp.asarray(accepted), jnp.asarray(running)))


def test_it_closes_tries_rarely_and_opens_again():
    gate = Gate(Fixed(), COSTS)
    accepted = np.zeros((1200, 1), np.int32)
    accepted[600:] = G
    drafts = play(gate, accepted)
    assert drafts[:2].all() and not drafts[2:10].any(), "nothing is known at first, and soon enough is"
    # A trial takes 0.7 plain rounds more than a plain round (4 + 13 against 10): one in 70 is a share of 0.01.
    waits = np.diff(np.flatnonzero(drafts[:600]))[1:]
    assert waits[:3].tolist() == [15, 29, 57] and (abs(waits[3:] - 71) <= 1).all() and len(waits) > 8
    opened = np.flatnonzero(np.convolve(drafts[600:], np.ones(20, int), "valid") == 20)[0]
    assert opened < 100 and drafts[600 + opened :].all()


def test_chance_does_not_close_it():
    rng = np.random.default_rng(0)
    drafts = play(Gate(Fixed(), COSTS), rng.choice([0, 1, 3, 3], (2000, 1)).astype(np.int32))  # 2.75 tokens for 1.7
    assert drafts.mean() > 0.97


def test_between_the_thresholds_it_stays_as_it_is():
    """A gain of one in a hundred: too little to open, no reason to close."""
    costs = StepCosts((Stairs(1, (1, 4), (10.0, 14.8), 5.0),))
    gate, steady = Gate(Fixed(), costs), np.ones((300, 1), np.int32)
    assert play(gate, steady).all()
    closed = np.concatenate([np.zeros((40, 1), np.int32), steady])
    assert play(gate, closed)[40:].mean() < 0.1


def test_it_counts_all_requests_and_only_the_running_ones():
    accepted = np.tile(np.array([[0, 0, 0, 3]], np.int32), (100, 1))
    costs = StepCosts((Stairs(8, (4, 16), (10.0, 11.0), 1.0),))
    gate = Gate(Fixed(), costs)
    assert play(gate, accepted).all(), "one good request pays for all: 7 tokens for 4 * 1.2"
    alone = np.ones((100, 4), bool)
    alone[:, 3] = False
    assert play(gate, accepted, alone)[8:].mean() < 0.2


def test_it_knows_few_requests_from_many():
    """Four at a time cost three times as much as one, drafted, and none of them tells anything of one alone."""
    costs = StepCosts((Stairs(1, (1, 4), (10.0, 12.0), 1.0), Stairs(4, (4, 16), (12.0, 36.0), 4.0)))
    running = np.zeros((400, 4), bool)
    running[:, 0] = True
    running[100:300] = True
    drafts = play(Gate(Fixed(), costs), np.ones((400, 4), np.int32), running)
    assert drafts[:100].all() and drafts[105:300].mean() < 0.1 and drafts[300:].all()


def test_it_believes_tokens_and_not_confidences():
    """Survival is 1 throughout, as without a confidence head, and nothing is accepted."""
    assert play(Gate(EarlyStop(COSTS), COSTS), np.zeros((400, 2), np.int32)).mean() < 0.05


def test_plain_stays_plain():
    assert not play(Gate(Plain(), COSTS), np.zeros((5, 1), np.int32)).any()


@pytest.mark.parametrize("padded", [False, True])
def test_seconds_of_a_drafted_round_are_those_of_its_step(padded):
    gate = Gate(Fixed(), COSTS)
    round = Round(jnp.array([True, True, False]), jnp.array([3, 1, 0]), padded)
    outcome = Outcome(jnp.ones((3, G)), jnp.array([3, 1, 0]), jnp.array([2, 0, 0]))
    state = gate.update(gate.initial_state(3, G), round, outcome).ledger(round)
    seconds = (4 + 18) / 13 if padded else (4 + 14) / 12  # a rectangle of 3 x 4 against 3, or 2 + 4 tokens against 2
    assert float(state.seconds) == pytest.approx(2 * seconds) and float(state.tokens) == 4 and float(state.rounds) == 2


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="for measuring only"):
        Gate(Oracle(COSTS), COSTS)
    for options in ({"minimum_gain": -1}, {"doubt": -1}, {"memory": 1.0}, {"trial_share": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            Gate(Fixed(), COSTS, **options)
