"""Answers of the real server to the real client: how they end, and that they are what plain decoding says."""

import json

import numpy as np
import openai
import pytest

from dspark_jax import Request
from tests.serve.conftest import CHARACTERS, LARGEST, MODEL, PAGE, TOKENS, G

FIRST, END = 3, 0  # ids of the first letter and of the end token
MESSAGES = [{"role": "user", "content": "what is it"}]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Ids of letters, without the start of any other prompt."""
    return np.random.default_rng(seed).integers(FIRST, FIRST + 26, length).tolist()


def complete(client, prompt, **options):
    """A greedy completion, but for what the options say."""
    extra = {k: options.pop(k) for k in ("stop_token_ids", "ignore_eos", "min_tokens", "speculative",
                                         "repetition_penalty", "top_k") if k in options}  # fmt: skip
    return client.completions.create(
        model=MODEL, prompt=prompt, **{"temperature": 0, "max_tokens": 20} | options, extra_body=extra
    )


def check(answer, expected, target) -> None:
    """An answer is a generation: text, count and ending."""
    choice, counted = answer.choices[0], expected.tokens
    assert choice.text == target.tokenizer.decode(counted)
    assert (choice.finish_reason, answer.usage.completion_tokens) == (expected.finish_reason, len(counted))


@pytest.mark.parametrize("length", [1, 17, 40])
def test_greedy_answers_are_plain_generations(served, client, target, solo, length):
    prompt = prompt_of(length, length)
    (expected,) = solo([Request(prompt, max_tokens=20)])
    check(complete(client, prompt), expected, target)
    chunks = list(complete(client, prompt, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == target.tokenizer.decode(expected.tokens)
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason


def test_chats_go_through_the_template(served, client, target, solo):
    content = [{"type": "text", "text": "what is"}, {"type": "text", "text": " it"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": content}]
    same = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is\n it"}]
    prompt = target.tokenizer.encode_chat(same)
    (expected,) = solo([Request(prompt, max_tokens=20)])
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_completion_tokens=20, n=2, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = list(answer)
    for index in range(2):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(c.delta.content or "" for c in mine) == target.tokenizer.decode(expected.tokens)
        assert mine[-1].finish_reason == expected.finish_reason
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(prompt), 2 * len(expected.tokens))


def test_a_chat_without_a_cap_ends_where_the_pool_does(served, client, target, solo):
    prompt = target.tokenizer.encode_chat(MESSAGES)
    (expected,) = solo([Request(prompt, max_tokens=LARGEST - len(prompt), ignore_eos=True)])
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].message.content == target.tokenizer.decode(expected.tokens)
    assert (answer.choices[0].finish_reason, answer.usage.total_tokens) == ("length", LARGEST)


def test_stop_ids_end_an_answer_wherever_they_lie_in_a_block(served, client, target, solo):
    prompt = prompt_of(6, 1)
    (free,) = solo([Request(prompt, max_tokens=20, ignore_eos=True)])
    where = sorted({free.tokens.index(token) for token in free.tokens})[: 2 * (G + 1)]  # first times of tokens
    assert len(where) > G + 1
    for at in where:
        stops = [free.tokens[at], *free.tokens[at + 3 : at + 4]]
        (expected,) = solo([Request(prompt, max_tokens=20, ignore_eos=True, stop_ids=stops)])
        for cap in {at, at + 1, 20} - {0}:  # behind the cap, at it, within it
            answer = complete(client, prompt, max_tokens=cap, ignore_eos=True, stop_token_ids=stops, logprobs=0)
            kept = expected.tokens[:cap]
            ended = "stop" if len(expected.tokens) <= cap else "length"
            shown = kept[:-1] if ended == "stop" else kept
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == (target.tokenizer.decode(shown), ended)
            assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.tokens) == len(kept)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_over_tokens_and_steps(served, client, target, solo, stream):
    count = 3 * (G + 1) + 2
    for seed in range(100):
        prompt = prompt_of(5, seed)
        (free,) = solo([Request(prompt, max_tokens=count, ignore_eos=True)])
        if all(token >= FIRST and isinstance(TOKENS[token - FIRST], str) for token in free.tokens):
            break
    text = target.tokenizer.decode(free.tokens)
    assert len(text) == count
    for start in range(2, 2 + G + 1):
        stops = [text[start : start + 2], text[start + 1 : start + 5], "never"]
        end, begin = min((text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text)
        answer = complete(client, prompt, ignore_eos=True, stop=stops, logprobs=0, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
        entries = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
        assert "".join(choice.text for choice in choices) == text[:begin]
        assert "".join(entries) == text[:end] and choices[-1].finish_reason == "stop"
        assert stream or answer.usage.completion_tokens == end


@pytest.mark.parametrize("cap", [1, G, G + 1, G + 2])
def test_caps_are_met_exactly(served, client, solo, target, cap):
    prompt = prompt_of(9, 3)
    answer = complete(client, prompt, max_tokens=cap, ignore_eos=True, logprobs=0)
    (expected,) = solo([Request(prompt, max_tokens=cap, ignore_eos=True)])
    check(answer, expected, target)
    assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.tokens) == cap


def test_answers_reach_the_last_position_and_no_prompt_goes_beyond(served, client, target, solo):
    for room in (1, G, G + 1, 9):
        prompt = prompt_of(LARGEST - room, 4)
        (expected,) = solo([Request(prompt, max_tokens=room, ignore_eos=True)])
        check(complete(client, prompt, max_tokens=100, ignore_eos=True), expected, target)
    for length in (LARGEST, LARGEST + 50):
        with pytest.raises(openai.BadRequestError, match=f"has {length} tokens; at most {LARGEST - 1} fit"):
            complete(client, prompt_of(length))
    (model,) = client.models.list()
    assert model.max_model_len == LARGEST


def test_a_prompt_that_comes_again_is_taken_from_the_cache(served, client):
    prompt = prompt_of(5 * PAGE, 5)
    options = dict(temperature=2, seed=7, max_tokens=40, ignore_eos=True)
    cold, warm = (complete(client, prompt, **options) for _ in range(2))
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == 4 * PAGE  # the last token is computed, so its page is
    assert warm.choices[0].text == cold.choices[0].text
    assert warm.usage.accepted_tokens == cold.usage.accepted_tokens > 0
    assert served.metrics()["cached_prompt_tokens_total"] >= 4 * PAGE


def test_characters_of_several_bytes_are_shown_whole(served, client):
    bias = {str(FIRST + i): 100 for i, token in enumerate(TOKENS) if isinstance(token, bytes)}
    options = dict(model=MODEL, messages=MESSAGES, temperature=2, seed=1, max_tokens=150, logit_bias=bias,
                   logprobs=True, extra_body={"ignore_eos": True})  # fmt: skip
    whole = client.chat.completions.create(**options).choices[0]
    raw = bytes(byte for entry in whole.logprobs.content for byte in entry.bytes)
    assert len(raw) == 150 and any(character in whole.message.content for character in CHARACTERS)
    assert whole.message.content == raw.decode(errors="replace")
    deltas = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**options, stream=True)]
    assert "".join(deltas) == whole.message.content and len(deltas) > 20


@pytest.mark.parametrize("top", [0, 1, 5])
def test_logprobs_do_not_hang_on_speculation(served, client, top):
    options = dict(prompt=prompt_of(8, 6), logprobs=top, ignore_eos=True)
    drafted, plain = (complete(client, speculative=said, **options) for said in (True, False))
    assert drafted.usage.verified_tokens > plain.usage.verified_tokens == 0
    ours, theirs = drafted.choices[0].logprobs, plain.choices[0].logprobs
    assert ours.tokens == theirs.tokens and len(ours.tokens) == 20
    np.testing.assert_allclose(ours.token_logprobs, theirs.token_logprobs, atol=1e-4)
    for one, other in zip(ours.top_logprobs, theirs.top_logprobs, strict=True):
        assert one.keys() == other.keys() and len(one) == max(top, 1)
        np.testing.assert_allclose(list(one.values()), list(other.values()), atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.4},
        {"logit_bias": {"7": 20.0, "9": -100.0}},
        {"min_tokens": 15, "stop_token_ids": list(range(FIRST, FIRST + 20))},
    ],
    ids=lambda change: next(iter(change)),
)
def test_changed_logits_do_not_hang_on_speculation(served, client, change):
    prompt = prompt_of(8, 7)
    drafted, plain = (complete(client, prompt, speculative=said, **change) for said in (True, False))
    assert drafted.choices[0].text == plain.choices[0].text != complete(client, prompt).choices[0].text
    assert drafted.usage.verified_tokens > plain.usage.verified_tokens == 0
    assert drafted.usage.completion_tokens == plain.usage.completion_tokens >= change.get("min_tokens", 1)


def test_seeds_decide_what_is_drawn(served, client):
    def texts(**options) -> list[str]:
        answer = complete(client, prompt_of(4, 8), temperature=1.5, n=2, max_tokens=8, ignore_eos=True, **options)
        return [choice.text for choice in answer.choices]

    for seed in (0, -(2**63), 2**63 - 1):
        assert texts(seed=seed) == texts(seed=seed) and len({*texts(seed=seed)}) == 2
    assert len({*texts(), *texts()}) == 4


def test_a_request_that_gives_way_comes_back_and_its_usage_stays(served, client, target, solo):
    cap = LARGEST - 5 * PAGE  # each needs all pages in the end
    requests = [Request(prompt_of(5 * PAGE, 10 + i), max_tokens=cap, ignore_eos=True) for i in range(2)]
    complete(client, requests[1].prompt, max_tokens=1)
    before = served.metrics()["preemptions"]
    answer = complete(client, [r.prompt for r in requests], max_tokens=cap, ignore_eos=True)
    assert served.metrics()["preemptions"] > before
    assert [c.text for c in answer.choices] == [target.tokenizer.decode(g.tokens) for g in solo(requests)]
    assert answer.usage.completion_tokens == 2 * cap
    # Its pages went to the other one, so that nothing of it was cached any more when it came back.
    assert answer.usage.prompt_tokens_details.cached_tokens == 4 * PAGE


def test_health_models_and_refusals_of_the_real_engine(served, client):
    assert served.raw("GET", "/health")[0] == 200
    assert [model.id for model in client.models.list()] == [MODEL]
    for says, options in {
        "stop_ids may be 32 at most": {"stop_token_ids": list(range(40))},
        "top_logprobs|less than or equal to 20": {"logprobs": 21},
        "prompt is empty": {"prompt": ""},
    }.items():
        with pytest.raises(openai.BadRequestError, match=says):
            complete(client, **{"prompt": "abc"} | options)
    body = json.dumps({"model": MODEL, "prompt": "a" * 10_000_000})
    assert served.raw("POST", "/v1/completions", body)[0] == 413
    body = json.dumps({"model": MODEL, "prompt": "a" * 200_000})
    status, _, said = served.raw("POST", "/v1/completions", body)
    assert status == 400 and f"has 200000 tokens; at most {LARGEST - 1} fit" in said.decode()
