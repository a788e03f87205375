"""Answers through the real client: whole and streamed, chat and completion."""

import json

import openai
import pytest

from tests.serve.api.conftest import EYE, H, blocks, raw, wait_until

MESSAGES = [{"role": "user", "content": "hi"}]
USAGE = {
    "prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 23, "prompt_tokens_details": {"cached_tokens": 1},
    "accept_length": 1.5, "rounds": 2, "drafted_tokens": 14, "verified_tokens": 10, "accepted_tokens": 1,
}  # fmt: skip


def test_chat(client, served):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hi", "stop")
    assert [(e.token, e.bytes, len(e.top_logprobs)) for e in choice.logprobs.content] == [
        ("h", [104], 2), ("i", [105], 2), ("<eos>", None, 2)]  # fmt: skip
    assert USAGE.items() <= json.loads(answer.usage.to_json()).items()
    assert answer.object == "chat.completion" and answer.model == "tiny" and answer.id.startswith("chatcmpl-")
    assert client.chat.completions.create(model="tiny", messages=MESSAGES).choices[0].logprobs is None


def test_chat_streams(client, served):
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, logprobs=True, stream_options={"include_usage": True}
        )
    )
    assert len({c.id for c in chunks}) == 1 and {c.object for c in chunks} == {"chat.completion.chunk"}
    deltas = [c.choices[0] for c in chunks[:-1]]
    assert [(d.delta.role, d.delta.content, d.finish_reason) for d in deltas] == [
        ("assistant", "", None), (None, "h", None), (None, "i", None), (None, None, "stop")]  # fmt: skip
    assert [[e.token for e in d.logprobs.content] if d.logprobs else None for d in deltas] == [
        None, ["h"], ["i", "<eos>"], None]  # fmt: skip
    assert chunks[-1].choices == [] and USAGE.items() <= json.loads(chunks[-1].usage.to_json()).items()


@pytest.mark.parametrize("usage", [False, True])
def test_wire_form_of_a_stream(served, usage):
    options = {"stream_options": {"include_usage": True}} if usage else {}
    body = json.dumps({"model": "tiny", "messages": MESSAGES, "stream": True, **options})
    status, headers, text = raw(served, "POST", "/v1/chat/completions", body)
    assert status == 200 and headers["Content-Type"] == "text/event-stream; charset=utf-8"
    events = text.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(e.startswith("data: {") for e in events[:-2])
    chunks = [json.loads(e[6:]) for e in events[:-2]]
    if usage:
        assert chunks.pop()["usage"] == USAGE and all(c["usage"] is None for c in chunks)
    else:
        assert all("usage" not in c for c in chunks)
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": ""}, {"content": "h"}, {"content": "i"}, {}]  # fmt: skip
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]


def test_completions(client, served):
    answer = client.completions.create(model="tiny", prompt=["hi", [H]], n=2, logprobs=1, echo=False)
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(i, "hi", "stop") for i in range(4)]
    form = answer.choices[0].logprobs
    assert (form.tokens, form.text_offset) == (["h", "i", "<eos>"], [0, 1, 2])
    assert form.top_logprobs[0] == {"h": -0.5} and answer.object == "text_completion"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 12)
    assert client.completions.create(model="tiny", prompt="ab€", echo=True).choices[0].text == "ab€hi"
    chunks = list(client.completions.create(model="tiny", prompt=["ab", [EYE]], echo=True, stream=True))
    for index, text in ((0, "abhi"), (1, "ihi")):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(c.text for c in mine) == text and mine[-1].finish_reason == "stop"
        assert all(c.finish_reason is None for c in mine[:-1])


def test_several_answers_stream_side_by_side(client, served, tokenizer):
    texts = iter(["one", "zwei", "tres"])
    served.engine.script = lambda request: [0.01, *blocks(tokenizer, next(texts))]
    chunks = client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, stream=True, seed=5)
    said = {0: "", 1: "", 2: ""}
    for chunk in chunks:
        said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert said == {0: "one", 1: "zwei", 2: "tres"}
    assert [r.seed for r in served.engine.requests] == [5, 6, 7]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_multi_byte_characters_survive_any_cut(client, served, tokenizer, size):
    text = "naïve 😀 «€» 日本\u2028 \n\ud7ff"
    served.says(*blocks(tokenizer, text, size))
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    assert client.chat.completions.create(model="tiny", messages=MESSAGES).choices[0].message.content == text


@pytest.mark.parametrize("size", [1, 3, 50])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_answer_and_the_engine(client, served, tokenizer, size, stream):
    served.says(*blocks(tokenizer, "one STEP STO STOP two STOP", size, reason="stop"))
    options = dict(model="tiny", messages=MESSAGES, stop=["STOP", "two"], logprobs=True)
    if stream:
        chunks = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        *chunks, last = list(chunks)
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        entries = [e.token for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
        reason, usage = chunks[-1].choices[0].finish_reason, last.usage
    else:
        answer = client.chat.completions.create(**options)
        entries = [e.token for e in answer.choices[0].logprobs.content]
        text, reason, usage = answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage
    assert (text, reason) == ("one STEP STO ", "stop") and "".join(entries) == text + "STOP"
    assert usage.completion_tokens == len(entries) == 17
    if size < 50:
        wait_until(lambda: len(served.engine.cancelled) == 1)


def test_answer_that_a_stop_string_ended_is_cancelled_while_others_run(client, served, tokenizer):
    scripts = iter([[*blocks(tokenizer, "a STOP b", 1)], [[H], 0.2, ([EYE], "length")]])
    served.engine.script = lambda request: next(scripts)
    with client.chat.completions.create(model="tiny", messages=MESSAGES, n=2, stop="STOP", stream=True) as chunks:
        for chunk in chunks:
            if chunk.choices[0].finish_reason == "stop":
                wait_until(lambda: len(served.engine.cancelled) == 1)
                assert len(served.engine.open) == 1


@pytest.mark.parametrize("cap", [1, 7, 8, 9])
def test_caps_tokens_logprobs_and_usage_agree(client, served, tokenizer, cap):
    served.says(*blocks(tokenizer, "h" * cap, 8))
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, max_completion_tokens=cap)
    choice = answer.choices[0]
    assert served.engine.requests[0].max_tokens == cap and choice.finish_reason == "length"
    assert answer.usage.completion_tokens == len(choice.logprobs.content) == len(choice.message.content) == cap


def test_models(client, served):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.models.retrieve("other/model")


def test_tools_and_extensions_pass_the_real_client(client, served):
    client.chat.completions.create(
        model="tiny", messages=[{"role": "developer", "content": [{"type": "text", "text": "s"}]}, *MESSAGES],
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}], max_completion_tokens=3,
        extra_body={"speculative": False, "top_k": 3, "chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    (request,) = served.engine.requests
    assert (request.speculative, request.top_k, request.max_tokens) == (False, 3, 3)


def test_metrics_count_what_was_served(client, served):
    def told() -> dict[str, float]:
        lines = raw(served, "GET", "/metrics")[2].decode().splitlines()
        return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    before = told()
    client.chat.completions.create(model="tiny", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=9)
    raw(served, "GET", "/nothing")
    wait_until(lambda: not served.server.serving.active)
    after = told()
    gained = {k: after[k] - before.get(k, 0) for k in after if after[k] != before.get(k, 0)}
    path = 'route="/v1/chat/completions"'
    expected = {
        f'dspark_requests_total{{outcome="ok",{path}}}': 1, f'dspark_requests_total{{outcome="refused",{path}}}': 1,
        'dspark_requests_total{outcome="refused",route="other"}': 1, "dspark_prompt_tokens_total": 20,
        "dspark_cached_prompt_tokens_total": 1, "dspark_generated_tokens_total": 3, "dspark_rounds_total": 2,
        "dspark_drafted_tokens_total": 14, "dspark_verified_tokens_total": 10, "dspark_accepted_tokens_total": 1,
        "dspark_accept_length_count": 1, "dspark_accept_length_sum": 1.5, "dspark_time_to_first_token_seconds_count": 1,
        "dspark_inter_token_seconds_count": 1, "dspark_request_seconds_count": 1,
    }  # fmt: skip
    assert expected.items() <= gained.items()
    assert "dspark_pages" in after and "dspark_recompiles" in after
