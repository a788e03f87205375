"""Chat rows of the common shapes, as messages that a template takes."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

# ShareGPT's names of who speaks.
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
}


class UnusableRow(ValueError):
    """A row of a known shape that gives nothing to learn from: counted and skipped."""


class Conversation(NamedTuple):
    """What a template renders.

    Attributes:
      messages: {"role", "content", ...}; options: `tools` and other arguments of the template.
      unfinished: the last answer was cut off, so its end token is not the target's.
    """

    messages: list[dict[str, Any]]
    options: dict[str, Any]
    unfinished: bool


def read_conversation(row: Mapping[str, Any]) -> Conversation:
    """The conversation of a row {"messages": [{"role", "content"}]} or {"conversations": [{"from", "value"}]}.

    A row may also hold `tools` (a list or its JSON), `chat_template_kwargs` (arguments of the template) and
    `finish_reason` (`length` if the last answer was cut off).

    Raises:
      ValueError: the row has another shape; UnusableRow: a speaker is unknown, or the assistant says nothing.
    """
    messages = _messages(row)
    if not any(message["role"] == "assistant" for message in messages):
        raise UnusableRow("no assistant turn")
    options = {**(row.get("chat_template_kwargs") or {}), **_tools(row)}
    return Conversation(messages, options, row.get("finish_reason") == "length")


def read_opening(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the first answer of a row answers: `messages` before the first assistant turn, and `tools` if it has any.

    Of a row of turns it is the first one.

    Raises:
      ValueError: the row has another shape; UnusableRow: nothing is asked.
    """
    if "turns" in row and not {"messages", "conversations"} & row.keys():
        turns = _list(row, "turns")
        if not turns or not isinstance(turns[0], str):
            raise ValueError(f"turns is {turns!r:.40}, expected texts")
        return {"messages": [{"role": "user", "content": turns[0]}]}
    messages = _messages(row)
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    if not first or messages[first - 1]["role"] != "user":
        raise UnusableRow("no user turn before the first answer")
    return {"messages": messages[:first], **_tools(row)}


def _tools(row: Mapping[str, Any]) -> dict[str, Any]:
    tools = row.get("tools")
    return {"tools": json.loads(tools) if isinstance(tools, str) else tools} if tools else {}


def _messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "messages" in row:
        messages = [_message(m, "role", "content") for m in _list(row, "messages")]
    elif "conversations" in row:
        messages = [_message(m, "from", "value") for m in _list(row, "conversations")]
        for message in messages:
            if message["role"] not in SPEAKERS:
                raise UnusableRow(f"unknown speaker {message['role']!r:.40}, expected one of {sorted(SPEAKERS)}")
            message["role"] = SPEAKERS[message["role"]]
    elif "turns" in row:
        raise ValueError("a row of turns is a prompt without answers; answer it with python -m train.regenerate")
    else:
        raise ValueError(
            f"its fields are {sorted(row)}; expected messages, conversations, or prompt and answer as token ids"
        )
    return messages


def _list(row: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(row[name], list):
        raise ValueError(f"{name} is {row[name]!r:.40}, expected a list")
    return row[name]


def _message(message: Any, role: str, content: str) -> dict[str, Any]:
    """A message with the names templates know; a content that is missing or null, as beside tool calls, is empty."""
    if not isinstance(message, Mapping) or not isinstance(message.get(role), str):
        raise ValueError(f"a message is {message!r:.80}, expected an object with {role!r} and {content!r}")
    text = message.get(content)
    if text is not None and not isinstance(text, str | list):
        raise ValueError(f"{content} is {text!r:.40}, expected text")
    if isinstance(text, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in text):
            raise UnusableRow("a content part that is no text")
        text = "".join(part["text"] for part in text)
    others = {k: v for k, v in message.items() if k not in (role, content) and v is not None}
    return {**others, "role": message[role], "content": text or ""}
