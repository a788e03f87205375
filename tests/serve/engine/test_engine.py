"""Whatever runs beside it, a request's tokens are those of its solo run, and nothing is left behind."""

import asyncio

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.calibration.survival import Scaling
from dspark_jax.scheduling import EarlyStop, Fixed, Gate, LaggedCapacity, Plain, Stairs, StepCosts, Threshold
from serve.engine.config import EngineConfig, ladder
from serve.engine.request import QueueFull, ServeRequest
from serve.engine.runner import Runner, rows_by_requests
from tests.serve.engine.conftest import CONFIG, G, collect, mixed, tokens_of

COSTS = StepCosts.from_steps_per_second({3: 10.0, 6: 9.9, 12: 9.8}, draft_seconds=0.001)
SCHEDULED = Gate(LaggedCapacity(COSTS), COSTS)


def check_empty(engine) -> None:
    pool = engine.scheduler.pool
    assert pool.used == 0 and pool.free + pool.cached == pool.total
    assert engine.live == 0 and not engine.scheduler.running and not engine.scheduler.waiting


@pytest.mark.parametrize("policy", [Plain(), Fixed(), Fixed(1), Threshold(0.3), SCHEDULED])
def test_greedy_requests_side_by_side_equal_their_solo_runs(engine, solo, policy):
    requests, before = mixed(14), engine.runner.programs
    found = collect(engine, requests, policy)
    for outputs, alone in zip(found, solo(requests), strict=True):
        assert tokens_of(outputs) == alone.tokens
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason == alone.finish_reason
        assert outputs[-1].usage.completion_tokens == len(alone.tokens)
    assert {alone.finish_reason for alone in solo(requests)} == {"stop", "length"}
    check_empty(engine)
    assert engine.runner.programs == before, "a program was compiled behind the start"


def test_sampled_requests_draw_and_accept_as_in_their_solo_runs(engine, solo):
    requests = mixed(10, seed=1, temperature=6.0, top_p=0.9) + mixed(4, seed=2, temperature=1.0, top_k=5)
    found, alone = collect(engine, requests), solo(requests, Fixed())
    assert [tokens_of(outputs) for outputs in found] == [generation.tokens for generation in alone]
    usages = [outputs[-1].usage for outputs in found]
    assert [u.accepted for u in usages] == [g.accepted.sum() for g in alone]
    assert [u.verified for u in usages] == [g.scheduled.sum() for g in alone]
    assert [u.rounds for u in usages] == [len(g.accept_lengths) for g in alone]
    assert sum(u.accepted for u in usages) > 50


def test_requests_that_do_not_fit_together_give_way_and_come_back(engine, solo):
    requests = [ServeRequest([i + 5] * 30, max_tokens=60, temperature=6.0, seed=i, ignore_eos=True) for i in range(3)]
    before = engine.scheduler.preemptions
    found = collect(engine, requests, Fixed(2))
    assert engine.scheduler.preemptions > before
    assert [len(tokens_of(outputs)) for outputs in found] == [60] * 3
    assert [tokens_of(outputs) for outputs in found] == [g.tokens for g in solo(requests, Fixed(2))]
    check_empty(engine)


def test_a_prompt_that_comes_again_is_found_for_target_and_drafter(engine, solo):
    prompt = np.random.default_rng(5).integers(0, 37, 40).tolist()
    request = ServeRequest(prompt, max_tokens=20, temperature=6.0, seed=3, ignore_eos=True)
    cold, warm = (collect(engine, [request])[0] for _ in range(2))
    assert warm[-1].usage.cached_tokens == 32 > cold[-1].usage.cached_tokens
    assert tokens_of(warm) == tokens_of(cold) == solo([request], Fixed())[0].tokens
    assert warm[-1].usage.accepted == cold[-1].usage.accepted > 5


def test_speculation_can_be_turned_off_for_one_request(engine, solo):
    requests = mixed(6, seed=3)
    requests[2] = ServeRequest([4, 5], max_tokens=30, ignore_eos=True, speculative=False)
    found = collect(engine, requests)
    assert [tokens_of(outputs) for outputs in found] == [g.tokens for g in solo(requests)]
    assert found[2][-1].usage.verified == 0 < found[3][-1].usage.verified


@pytest.mark.parametrize(
    "change",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.3},
        {"logit_bias": {7: 4.0, 9: -100.0}},
        {"min_tokens": 20},
    ],
)
def test_changed_logits_hold_with_speculation_as_without(engine, change):
    requests = [ServeRequest([5, 6, 7, 5], max_tokens=30, **change), *mixed(4, seed=4)]
    drafted, plain = (tokens_of(collect(engine, requests, policy)[0]) for policy in (Fixed(), Plain()))
    unchanged = tokens_of(collect(engine, [ServeRequest([5, 6, 7, 5], max_tokens=30)])[0])
    assert drafted == plain
    assert drafted != unchanged or change == {"min_tokens": 20}
    assert len(drafted) >= change.get("min_tokens", 1)


def test_a_repetition_is_punished_within_a_block(engine):
    never_twice = ServeRequest([1], max_tokens=20, frequency_penalty=2.0, presence_penalty=2.0, ignore_eos=True,
                               logit_bias={i: 50.0 for i in range(10, 37)})  # fmt: skip
    tokens = tokens_of(collect(engine, [never_twice], Fixed())[0])
    assert len(set(tokens[:10])) > 5


def test_logprobs_are_the_targets_one_a_token(engine, stopping_target):
    request = ServeRequest([5, 6, 7], max_tokens=25, logprobs=4, temperature=3.0, seed=1, ignore_eos=True)
    outputs = collect(engine, [request])[0]
    told, tokens = [entry for output in outputs for entry in output.logprobs], tokens_of(outputs)
    assert [entry.token for entry in told] == tokens
    row = jnp.array([[5, 6, 7, *tokens]])
    positions = jnp.arange(row.shape[1])[None]
    hidden, _, _ = stopping_target(row, positions, stopping_target.create_cache(1, row.shape[1]))
    logits = np.asarray(stopping_target.logits(hidden)[0, 2:-1], np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose([entry.logprob for entry in told], logs[np.arange(25), tokens], atol=1e-5)
    for entry, expected in zip(told, logs, strict=True):
        assert [token for token, _ in entry.top] == np.argsort(-expected)[:4].tolist()
        np.testing.assert_allclose([value for _, value in entry.top], np.sort(expected)[::-1][:4], atol=1e-5)


def test_a_request_that_is_left_frees_its_slot_wherever_it_is(engine):
    long = ServeRequest([1] * 40, max_tokens=50, ignore_eos=True)

    async def leave(after: int) -> None:
        streams = [engine.submit(long) for _ in range(5)]  # three run, two wait
        seen = 0
        async for _ in streams[0]:
            seen += 1
            if seen == after:
                break
        for stream in streams:
            stream.cancel()
        endings = [[o async for o in stream][-1].finish_reason for stream in streams[1:]]
        assert endings == ["abort"] * 4

    engine.use(Fixed())
    for after in (1, 3, 5):
        asyncio.run(leave(after))
        check_empty(engine)
    assert len(tokens_of(collect(engine, [long])[0])) == 50


def test_what_can_never_run_is_refused_at_once_and_a_full_queue_says_so(engine):
    async def submit(request: ServeRequest, times: int = 1) -> None:
        streams = []
        try:
            for _ in range(times):
                streams.append(engine.submit(request))
        finally:
            for stream in streams:
                stream.cancel()
                assert [output async for output in stream][-1].finish_reason == "abort"

    bad = {
        "at most 95 fit": ServeRequest([1] * 96),
        "prompt is empty": ServeRequest([]),
        "logprobs must be within 0..20": ServeRequest([1], logprobs=21),
        "min_tokens must be within": ServeRequest([1], max_tokens=2, min_tokens=3),
        "presence_penalty must be": ServeRequest([1], presence_penalty=3),
        "repetition_penalty must be above 0": ServeRequest([1], repetition_penalty=0),
        "logit_bias must be": ServeRequest([1], logit_bias={99: 1.0}),
        "temperature must be": ServeRequest([1], temperature=-1),
    }
    for says, request in bad.items():
        with pytest.raises(ValueError, match=says):
            asyncio.run(submit(request))
    with pytest.raises(QueueFull, match="33 requests wait"):
        asyncio.run(submit(ServeRequest([1]), CONFIG.slots + CONFIG.max_waiting + 1))
    with pytest.raises(ValueError, match="EarlyStop sizes a step by its own survival"):
        engine.use(EarlyStop(COSTS))


def test_programs_that_take_longer_than_larger_ones_are_not_run():
    assert Stairs(1, (1, 2, 4, 8, 12, 16), (5.0, 7.0, 6.0, 6.5, 15.0, 11.0)).useful == [1, 4, 8, 16]


def test_steps_run_in_programs_that_hold_them():
    sizes = ladder(24, halves=True)
    assert sizes == [1, 2, 4, 6, 8, 12, 16, 24]
    found = rows_by_requests(sizes, [1, 2, 4], 5)
    assert found == {1: [1, 2, 4, 6], 2: [2, 4, 6, 8, 12], 4: [4, 6, 8, 12, 16, 24]}
    assert rows_by_requests(sizes, [1, 2, 4], 0) == {1: [1], 2: [2], 4: [4]}
    assert rows_by_requests([6, 24], [4], 5) == {4: [6, 24]}


def test_no_drafts_and_no_size_given_take_what_the_target_has(stopping_target, drafter):
    scaling = Scaling((1.0,) * G)
    runner = Runner(stopping_target, drafter, EngineConfig(slots=2, block_size=0, page_size=8), scaling)
    assert not runner.drafts and runner.max_length == stopping_target.config.max_positions


def test_no_request_starves_beside_surer_ones(engine):
    sure = StepCosts.from_steps_per_second({3: 10.0, 6: 9.9, 12: 0.1})  # three drafts for three requests
    requests = [ServeRequest([i], max_tokens=40, ignore_eos=True) for i in range(3)]
    fair = collect(engine, requests, LaggedCapacity(sure, floor=1))
    for outputs in fair:
        usage = outputs[-1].usage
        assert usage.verified >= usage.rounds - 4, "a draft of every request in every round, but for the last ones"


def test_blocks_fill_the_step_that_the_budget_leaves(engine):
    before = engine.counts.verified, engine.counts.drafted_steps
    collect(engine, [ServeRequest([2], max_tokens=40, temperature=6.0, seed=1, ignore_eos=True)], SCHEDULED)
    verified, steps = engine.counts.verified - before[0], engine.counts.drafted_steps - before[1]
    assert steps > 5 and verified > 2 * steps, f"one request alone verifies nearly whole blocks of {G}"
