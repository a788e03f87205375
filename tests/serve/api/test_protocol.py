"""What requests ask of the engine, and how what is not supported is refused."""

import json
import re

import pytest

from dspark_jax.tokenizer import ChatTokenizer
from serve.api.errors import ApiError
from serve.api.prompts import prepare
from serve.api.protocol import ChatRequest, CompletionRequest
from serve.engine.request import ServeRequest
from tests.serve.api.conftest import END, MAX_LENGTH

USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def ask(tokenizer, kind=ChatRequest, **fields):
    base = {"messages": [USER]} if kind is ChatRequest else {"prompt": "hi"}
    return prepare(json.dumps({"model": "tiny", **base, **fields}).encode(), kind, "tiny", tokenizer, MAX_LENGTH)


def refusal(tokenizer, kind=ChatRequest, **fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(tokenizer, kind, **fields)
    assert caught.value.status in (400, 404)
    return caught.value


def chat_text(tokenizer, **fields) -> str:
    return tokenizer.decode(ask(tokenizer, **fields).prompts[0], skip_special_tokens=False)


def test_defaults_are_those_of_openai(tokenizer):
    ids = tokenizer.encode("<user>hi<eos><assistant>")
    plain = dict(temperature=1.0, top_p=1.0, logprobs=None, speculative=True)
    assert ask(tokenizer).requests == [ServeRequest(ids, max_tokens=MAX_LENGTH - len(ids), **plain)]
    prompt = tokenizer.encode("hi")
    assert ask(tokenizer, CompletionRequest).requests == [ServeRequest(prompt, max_tokens=16, **plain)]


def test_every_parameter_reaches_the_engine(tokenizer):
    fields = dict(
        temperature=0, top_p=0.5, top_k=5, min_p=0.1, seed=-(2**63), min_tokens=2, presence_penalty=-2,
        frequency_penalty=0.5, repetition_penalty=1.5, ignore_eos=True, speculative=False,
    )  # fmt: skip
    extra = dict(logit_bias={"7": -100}, stop_token_ids=[END], n=2, max_tokens=9)
    expected = dict(logit_bias={7: -100}, stop_ids=(END,), max_tokens=9, logprobs=3)
    job = ask(tokenizer, logprobs=True, top_logprobs=3, **fields, **extra)
    first = ServeRequest(job.prompts[0], **{**fields, **expected})
    assert job.requests[0] == first
    assert [r.seed for r in job.requests] == [-(2**63), -(2**63) + 1]
    job = ask(tokenizer, CompletionRequest, logprobs=3, **fields, **extra)
    assert job.requests[0] == ServeRequest(job.prompts[0], **{**fields, **expected})
    assert ask(tokenizer, logprobs=True).requests[0].logprobs == 0
    assert ask(tokenizer, max_completion_tokens=3).requests[0].max_tokens == 3
    assert [r.seed for r in ask(tokenizer, CompletionRequest, prompt=["a", "b"], seed=2**63 - 1, n=2).requests] == [
        2**63 - 1, 2**63, 2**63 - 1, 2**63]  # fmt: skip


@pytest.mark.parametrize("stop", ["x", ["x"], ["x", "yz"]])
def test_stop_is_a_string_or_several(tokenizer, stop):
    assert ask(tokenizer, stop=stop).asked.stop == (["x"] if stop == "x" else stop)


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [71, 72], [[71, 72]], ["hi", [71, 72]]])
def test_prompts_of_every_form(tokenizer, prompt):
    job = ask(tokenizer, CompletionRequest, prompt=prompt, echo=True)
    assert set(map(tuple, job.prompts)) == {(71, 72)} and set(job.texts) == {"hi"}


def test_conversations_as_the_template_has_them(tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat_text(tokenizer, messages=[{"role": "user", "content": parts}]) == "<user>a\nb<eos><assistant>"
    for role in ("system", "developer"):  # this template knows no developer
        told = chat_text(tokenizer, messages=[{"role": role, "content": "s"}, USER])
        assert told == "<system>s<eos><user>hi<eos><assistant>"
    knows = ChatTokenizer(tokenizer.tokenizer, template="{% if messages[0].role == 'developer' %}yes{% endif %}")
    assert chat_text(knows, messages=[{"role": "developer", "content": "s"}]) == "yes"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]
    asked = [USER, {"role": "assistant", "content": None, "refusal": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "r"}]  # fmt: skip
    told = chat_text(tokenizer, messages=asked, tools=tools, tool_choice="auto")
    assert told == f'[{json.dumps(tools)}]<user>hi<eos><assistant>{{"a": 1}}<eos><tool>r<eos><assistant>'
    assert chat_text(tokenizer, tools=tools, tool_choice="none") == chat_text(tokenizer)
    assert chat_text(tokenizer, chat_template_kwargs={"enable_thinking": False}).endswith("<assistant></think>")


def test_fields_that_ask_for_nothing_are_accepted(tokenizer):
    neutral = dict(response_format={"type": "text"}, store=False, modalities=["text"], audio=None, suffix="", best_of=1)
    assert ask(tokenizer, stop=None, temperature=None, top_logprobs=None, foo=None, **neutral).requests


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"foo": 1}, "foo is not supported"),
        ({"response_format": {"type": "json_object"}}, r'response_format is not .* other than {"type": "text"}'),
        ({"best_of": 2}, "best_of is not supported, other than 1"),
        ({"best_of": True}, "best_of is not supported, other than 1"),
        ({"suffix": "x"}, "suffix is not supported"),
        ({"audio": {}}, "audio is not supported"),
        ({"modalities": ["audio"]}, "modalities is not supported"),
        ({"functions": []}, "functions is not supported"),
        ({"tools": [{}], "tool_choice": "required"}, "tool_choice: Input should be 'auto' or 'none', got 'required'"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "parts of type 'image_url' are not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "A text part must be"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\.0\.content: .* a valid string, got 5"),
        ({"messages": [{"role": "user"}]}, "A message of role 'user' needs content"),
        ({"messages": [{"role": "function", "content": "x"}]}, r"messages\.0\.role: Input should be 'system', "),
        ({"messages": [{**USER, "audio": {}}]}, r"messages\.0\.audio is not supported"),
        ({"messages": [{**USER, "name": "bob"}]}, "chat template of this model has no 'name'"),
        ({"messages": [{"role": "tool", "content": ""}]}, "chat template refuses these messages: an empty result"),
        ({"messages": "hi"}, "messages: Input should be a valid list, got 'hi'"),
        ({"chat_template_kwargs": {"thinking": True}}, "chat template of this model has no 'thinking'"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs cannot set .'messages'"),
        ({"model": "gpt"}, "There is no model 'gpt' here, only 'tiny'"),
        ({"temperature": -0.1}, "temperature: Input should be greater than or equal to 0, got -0.1"),
        ({"temperature": 2.1}, "temperature: Input should be less than or equal to 2"),
        ({"temperature": "1"}, "temperature: Input should be a valid number"),
        ({"temperature": True}, "temperature: Input should be a valid number"),
        ({"top_p": 1.1}, "top_p: Input should be less than or equal to 1"),
        ({"top_k": -2}, "top_k: Input should be greater than or equal to -1"),
        ({"top_k": 2**31}, "top_k: Input should be less than 2147483648"),
        ({"min_p": -1}, "min_p: Input should be greater"),
        ({"repetition_penalty": 0}, "repetition_penalty: Input should be greater than 0"),
        ({"presence_penalty": 3}, "presence_penalty: Input should be less"),
        ({"frequency_penalty": -3}, "frequency_penalty: Input should be greater"),
        ({"seed": 2**63}, "seed: Input should be less than"),
        ({"seed": 1.5}, "seed: Input should be a valid integer"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1, got 0"),
        ({"max_tokens": -1}, "max_tokens: Input should be greater than or equal to 1, got -1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens: Input should be greater than or equal to 1"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens and max_completion_tokens differ"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens is 3, which is more than the 2 tokens asked for"),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"n": 129}, "n: Input should be less than or equal to 128"),
        ({"stop": ""}, r"stop\.0: String should have at least 1 character"),
        ({"stop": ["a"] * 17}, "stop: List should have at most 16 items"),
        ({"stop": ["a" * 257]}, r"stop\.0: String should have at most 256 characters"),
        ({"stop": 5}, "stop: Input should be a valid list"),
        ({"logprobs": 1}, "logprobs: Input should be a valid boolean"),
        ({"top_logprobs": 1}, "top_logprobs is for requests with logprobs true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: Input should be less than or equal to 20, got 21"),
        ({"logit_bias": {"a": 1}}, "logit_bias.*valid integer"),
        ({"logit_bias": {"1": 101}}, r"logit_bias\.1: Input should be less than or equal to 100"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias has 1025 entries; at most 1024"),
        ({f"x{i}": 1 for i in range(100)}, "102 fields in one object are too many"),
        ({"stop_token_ids": [-1] * 9}, r"stop_token_ids\.0: Input should be greater than or equal to 0"),
        ({"logit_bias": {"999": 1}}, r"logit_bias holds \[999\]; token ids must be below 259"),
        ({"stop_token_ids": [999]}, r"stop_token_ids holds \[999\]"),
        ({"stream_options": {"include_usage": True}}, "stream_options is for requests with stream true"),
        ({"stream": True, "stream_options": {"x": 1}}, r"stream_options\.x is not supported"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "The prompt has 618 tokens; at most 511 fit"),
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, dict) else "",
)
def test_chats_that_are_refused(tokenizer, fields, says):
    assert re.search(says, refusal(tokenizer, **fields).message)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": ""}, "The prompt is empty; expected at least one token"),
        ({"prompt": ["a", ""]}, "The prompt is empty"),
        ({"prompt": []}, "prompt: List should have at least 1 item"),
        ({"prompt": [[]]}, "A prompt must be text, a list of texts, a list of token ids or a list of such lists"),
        ({"prompt": [-1]}, "A prompt must be"),
        ({"prompt": [1, True]}, "A prompt must be"),
        ({"prompt": {}}, "A prompt must be"),
        ({"prompt": [259]}, r"prompt holds \[259\]; token ids must be below 259"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": None}, "prompt is required"),
        ({"prompt": [0] * MAX_LENGTH}, "The prompt has 512 tokens; at most 511 fit"),
        ({"prompt": [0] * 400, "max_tokens": 500, "min_tokens": 200}, "min_tokens is 200, but .* 400 .* room for 112"),
        ({"prompt": ["a"] * 65, "n": 2}, "65 prompts times n = 2 are more than 128 answers"),
        ({"logprobs": 21}, "logprobs: Input should be less than or equal to 20"),
        ({"logprobs": True}, "logprobs: Input should be a valid integer"),
        ({"echo": True, "logprobs": 0}, "echo with logprobs is not supported"),
        ({"messages": [USER]}, "messages is not supported"),
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, dict) else "",
)
def test_completions_that_are_refused(tokenizer, fields, says):
    assert re.search(says, refusal(tokenizer, CompletionRequest, **fields).message)


def test_prompts_up_to_the_limit_and_caps_beyond_it_are_accepted(tokenizer):
    job = ask(tokenizer, CompletionRequest, prompt=[0] * (MAX_LENGTH - 1), max_tokens=10**40)
    assert job.requests[0].max_tokens == 1
    assert ask(tokenizer, CompletionRequest, prompt=[0]).requests[0].prompt == [0]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"), (b"{", "not valid JSON"), (b"[1]", "must be a JSON object, got list"),
        (b'{"temperature": NaN}', "not valid JSON"), (b'{"a": "\\ud800"}', "not valid JSON"),
        (b"\xff", "not valid JSON"), (b"[" * 100_000, "not valid JSON"), (b"{}", "is required"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not valid JSON"),
    ],
)  # fmt: skip
def test_bodies_that_are_no_requests(tokenizer, body, says):
    for kind in (ChatRequest, CompletionRequest):
        with pytest.raises(ApiError, match=says) as caught:
            prepare(body, kind, "tiny", tokenizer, MAX_LENGTH)
        assert caught.value.status == 400


def test_tokenizers_without_a_template_refuse_chats(tokenizer):
    assert "no chat template" in refusal(ChatTokenizer(tokenizer.tokenizer)).message
    assert "has no 'tools'" in refusal(ChatTokenizer(tokenizer.tokenizer), tools=[{}]).message
