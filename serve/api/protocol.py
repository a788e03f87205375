"""Requests of OpenAI's API that are understood. What is not is refused by name, never ignored; null is absent."""

import contextlib
import json
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from serve.api.errors import ApiError
from serve.engine.request import TOP

MAX_CHOICES = 128
"""Answers a request: its prompts times `n`."""

MAX_STOPS, MAX_STOP_LENGTH = 16, 256
"""Stop strings a request, and characters of each."""

MAX_BIASES = 1024

MAX_FIELDS = 100
"""Names an object may have, so that a body of nothing but mistakes is not told every one of them."""

NEUTRAL: Mapping[str, Any] = {
    "best_of": 1,
    "metadata": {},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "store": False,
    "suffix": "",
}
"""Fields that are not supported, and the value of each that asks for nothing."""


def _refuse(message: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{message}", {"message": message})


def _join_parts(content: Any) -> Any:
    """Text of a list of text parts, a line each."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise _refuse(f"Content parts of type {kind!r} are not supported; expected 'text'")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise _refuse('A text part must be {"type": "text", "text": "..."} and nothing else')
    return "\n".join(part["text"] for part in content)


def _check_biases(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise _refuse(f"logit_bias has {len(biases)} entries; at most {MAX_BIASES} are supported")
    return biases


def _list_stops(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _list_prompts(prompt: Any) -> Any:
    """A list of prompts, each text or token ids."""
    prompts = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    if not all(isinstance(each, str) or _is_ids(each) for each in prompts):
        raise _refuse("A prompt must be text, a list of texts, a list of token ids or a list of such lists")
    return prompts


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(i) is int and i >= 0 for i in prompt)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        if len(fields) > MAX_FIELDS:
            raise _refuse(f"{len(fields)} fields in one object are too many; at most {MAX_FIELDS} are known")
        return {k: v for k, v in fields.items() if v is not None}


class StreamOptions(_Strict):
    include_usage: bool = False


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_join_parts)] = ""
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], FailFast()] = []
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if "content" not in self.model_fields_set and not (self.role == "assistant" and self.tool_calls):
            raise _refuse(f"A message of role {self.role!r} needs content")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: arguments of tool calls are objects."""
        message = self.model_dump(exclude_unset=True)
        for call in message.get("tool_calls", ()):
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                # A template may still show what is no JSON, or too deep.
                with contextlib.suppress(ValueError, RecursionError):
                    function["arguments"] = json.loads(function["arguments"])
        return message


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenKey = Annotated[TokenId, Field(strict=False)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class Sampled(_Strict):
    """What both kinds of request have in common. Defaults are OpenAI's; the third block is what others added to it."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[StopString], Field(max_length=MAX_STOPS), BeforeValidator(_list_stops)] = []
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[TokenKey, Bias], BeforeValidator(_check_biases)] = {}
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenId], FailFast()] = []
    speculative: bool = True

    @property
    def cap(self) -> int | None:
        """New tokens at most; None: as many as fit."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """Log probabilities wanted of each token besides its own; None wants none."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _agrees(self) -> "Sampled":
        if self.stream_options is not None and not self.stream:
            raise _refuse("stream_options is for requests with stream true")
        if self.cap is not None and self.min_tokens > self.cap:
            raise _refuse(f"min_tokens is {self.min_tokens}, which is more than the {self.cap} tokens asked for")
        return self


class ChatRequest(Sampled):
    """Of /v1/chat/completions. Tools are shown to the model; its calls come back as the text that it writes."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=TOP)
    tools: Annotated[list[dict[str, Any]], FailFast()] = []
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def cap(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _agrees_chat(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise _refuse("top_logprobs is for requests with logprobs true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise _refuse("max_tokens and max_completion_tokens differ; give one of them")
        return self


class CompletionRequest(Sampled):
    """Of /v1/completions."""

    prompt: Annotated[list[str | list[int]], Field(min_length=1), BeforeValidator(_list_prompts)]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=TOP)
    echo: bool = False

    @property
    def top(self) -> int | None:
        return self.logprobs

    @model_validator(mode="after")
    def _agrees_completion(self) -> "CompletionRequest":
        if self.echo and self.logprobs is not None:
            raise _refuse("echo with logprobs is not supported: prompts have no log probabilities here")
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise _refuse(f"{len(self.prompt)} prompts times n = {self.n} are more than {MAX_CHOICES} answers")
        return self


Kind = TypeVar("Kind", bound=Sampled)


def parse(body: bytes, kind: type[Kind]) -> Kind:
    """Reads a request.

    Raises:
      ApiError: 400, naming the field and what was expected.
    """
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, f"The body must be a JSON object, got {type(fields).__name__}.", code="invalid_json")
    fields = {k: v for k, v in fields.items() if k not in NEUTRAL or json.dumps(v) != json.dumps(NEUTRAL[k])}
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, _say(first, param), param=param or None, code="invalid_value") from error


def _say(error: Mapping[str, Any], param: str) -> str:
    match error["type"]:
        case "extra_forbidden":
            other = f", other than {json.dumps(NEUTRAL[param])}" if param in NEUTRAL else ""
            return f"{param} is not supported{other}."
        case "missing":
            return f"{param} is required."
        case "refused":
            return f"{error['msg']}."
        case _:
            return f"{param}: {error['msg']}, got {reprlib.repr(error['input'])}."
