"""From requests of the API to requests of the engine."""

import dataclasses
from collections.abc import Iterable

from dspark_jax.tokenizer import ChatTokenizer
from serve.api.errors import ApiError
from serve.api.protocol import ChatRequest, CompletionRequest, Sampled, parse
from serve.engine.request import ServeRequest

BUILT_IN = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "prompt", "self"}
"""Names of a chat template that a request sets by other means."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A request as the server runs it.

    Attributes:
      asked: the request as it came.
      prompts: token ids of each prompt; texts: what is shown before each answer.
      requests: one an answer, `asked.n` of each prompt one after the other.
    """

    asked: Sampled
    prompts: list[list[int]]
    texts: list[str]
    requests: list[ServeRequest]


def prepare(
    body: bytes, kind: type[ChatRequest | CompletionRequest], model: str, tokenizer: ChatTokenizer, max_length: int
) -> Job:
    """Reads a request and encodes its prompts; takes as long as the prompts are long.

    Raises:
      ApiError: 400, or 404 for another model.
    """
    asked = parse(body, kind)
    if asked.model != model:
        raise ApiError(404, f"There is no model {asked.model!r:.80} here, only {model!r}.", param="model",
                       code="model_not_found")  # fmt: skip
    for name, ids in (("stop_token_ids", asked.stop_token_ids), ("logit_bias", asked.logit_bias)):
        _check_ids(ids, tokenizer, name)
    if isinstance(asked, ChatRequest):
        prompts, texts = [_encode_chat(asked, tokenizer)], [""]
    else:
        assert isinstance(asked, CompletionRequest)
        prompts = [_encode(each, tokenizer) for each in asked.prompt]
        texts = [
            (each if isinstance(each, str) else tokenizer.decode(each)) if asked.echo else "" for each in asked.prompt
        ]
    requests = []
    for prompt in prompts:
        room = max_length - len(prompt)
        if not prompt:
            raise ApiError(400, "The prompt is empty; expected at least one token.", param=_field(asked))
        if room < 1:
            raise ApiError(
                400, f"The prompt has {len(prompt)} tokens; at most {max_length - 1} fit. Shorten it.",
                param=_field(asked), code="context_length_exceeded",
            )  # fmt: skip
        if asked.min_tokens > room:
            raise ApiError(
                400, f"min_tokens is {asked.min_tokens}, but a prompt of {len(prompt)} tokens leaves room for {room}.",
                param="min_tokens", code="invalid_value",
            )  # fmt: skip
        base = _request(asked, prompt, room)
        # Answers to one prompt differ; seeds lie within 63 bits, so that these stay within 64.
        seeds = [None if base.seed is None else base.seed + i for i in range(asked.n)]
        requests += [dataclasses.replace(base, seed=seed) for seed in seeds]
    return Job(asked, prompts, texts, requests)


def _request(asked: Sampled, prompt: list[int], room: int) -> ServeRequest:
    return ServeRequest(
        prompt=prompt,
        max_tokens=room if asked.cap is None else min(asked.cap, room),
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        stop_ids=tuple(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
        seed=asked.seed,
        min_tokens=asked.min_tokens,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        logit_bias=asked.logit_bias,
        logprobs=asked.top,
        speculative=asked.speculative,
    )


def _encode(prompt: str | list[int], tokenizer: ChatTokenizer) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    _check_ids(prompt, tokenizer, "prompt")
    return prompt


def _encode_chat(asked: ChatRequest, tokenizer: ChatTokenizer) -> list[int]:
    """Ids of a conversation.

    Raises:
      ApiError: the template refuses it, or has no use for something that was given.
    """
    known = tokenizer.template_names
    used = {
        "tools": asked.tools if asked.tool_choice == "auto" else [],
        "tool_calls": any(m.tool_calls for m in asked.messages),
        "name": any(m.name for m in asked.messages),
    }
    for name, value in (used | dict.fromkeys(asked.chat_template_kwargs, True)).items():
        if value and name not in known:
            raise ApiError(400, f"The chat template of this model has no {name!r}.", param=name)
    if taken := BUILT_IN & asked.chat_template_kwargs.keys():
        raise ApiError(400, f"chat_template_kwargs cannot set {sorted(taken)}.", param="chat_template_kwargs")
    messages = [message.for_template() for message in asked.messages]
    if "developer" not in known:  # OpenAI's newer name of it
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    options = asked.chat_template_kwargs | ({"tools": used["tools"]} if used["tools"] else {})
    try:
        return tokenizer.encode_chat(messages, **options)
    except ValueError as error:
        raise ApiError(400, f"{error}", param="messages") from error


def _check_ids(ids: Iterable[int], tokenizer: ChatTokenizer, name: str) -> None:
    if wrong := [i for i in ids if i >= tokenizer.num_tokens][:3]:
        raise ApiError(400, f"{name} holds {wrong}; token ids must be below {tokenizer.num_tokens}.", param=name)


def _field(asked: Sampled) -> str:
    return "messages" if isinstance(asked, ChatRequest) else "prompt"
