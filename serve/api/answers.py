"""Answers in the wire form of OpenAI's API, as plain dicts: one is made for every step of every request."""

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from serve.api.logprobs import TokenTexts, chat_logprobs, completion_logprobs
from serve.api.text import Piece
from serve.engine.request import Usage


class Form:
    """How one request is answered.

    Attributes:
      include_usage: a stream ends with a chunk of usage.
    """

    def __init__(self, chat: bool, model: str, texts: TokenTexts, *, logprobs: bool, include_usage: bool):
        self.chat, self.include_usage = chat, include_usage
        self._texts, self._logprobs = texts, logprobs
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": self.id, "object": self._kind, "created": int(time.time()), "model": model}
        chunk = self._head | ({"object": "chat.completion.chunk"} if chat else {})
        # With usage asked for, OpenAI has the field on every chunk.
        self._chunk = chunk | ({"usage": None} if include_usage else {})

    def opening(self, index: int, text: str) -> dict[str, Any] | None:
        """The chunk before the first token: the role, or the prompt that is echoed."""
        if self.chat:
            return self._choices(index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None}, None)
        return self._choices(index, {"text": text, "logprobs": None}, None) if text else None

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """A chunk of text."""
        body = {"delta": {"content": piece.text}} if self.chat else {"text": piece.text}
        return self._choices(index, body | {"logprobs": self._of(piece.logprobs)}, None)

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]:
        """The chunk behind the last token."""
        body: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        return self._choices(index, body | {"logprobs": None}, finish_reason)

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk, of a request that asked for usage."""
        return self._chunk | {"choices": [], "usage": usage}

    def whole(self, choices: Iterable[tuple[int, Piece, str]], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer of a request that is not streamed: index, text and finish reason of each choice."""
        bodies = []
        for index, piece, reason in choices:
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            body: dict[str, Any] = {"message": message} if self.chat else {"text": piece.text}
            bodies.append({"index": index, **body, "logprobs": self._of(piece.logprobs), "finish_reason": reason})
        return self._head | {"choices": bodies, "usage": usage}

    def _choices(self, index: int, body: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return self._chunk | {"choices": [{"index": index, **body, "finish_reason": reason}]}

    def _of(self, entries: Sequence) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return (chat_logprobs if self.chat else completion_logprobs)(entries, self._texts)


def usage(prompts: Sequence[Usage], answers: Sequence[Usage]) -> dict[str, Any]:
    """Of a whole request; a prompt counts once, however many answers it got.

    What OpenAI's API does not have: `accept_length` is the mean of tokens a round (a step of drafting and verification,
    bonus token included), null where none was run; the other counts are of draft tokens.
    """
    total = Usage(
        prompt_tokens=sum(u.prompt_tokens for u in prompts),
        completion_tokens=sum(u.completion_tokens for u in answers),
        cached_tokens=sum(u.cached_tokens for u in prompts),
        rounds=sum(u.rounds for u in answers),
        drafted=sum(u.drafted for u in answers),
        verified=sum(u.verified for u in answers),
        accepted=sum(u.accepted for u in answers),
    )
    return {
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": total.completion_tokens,
        "total_tokens": total.prompt_tokens + total.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": total.cached_tokens},
        "accept_length": total.mean_accept_length,
        "rounds": total.rounds,
        "drafted_tokens": total.drafted,
        "verified_tokens": total.verified,
        "accepted_tokens": total.accepted,
    }
