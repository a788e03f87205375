"""Log probabilities in the forms of OpenAI's API."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import pre_tokenizers

from dspark_jax.tokenizer import ChatTokenizer
from serve.engine.request import TokenLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON has not."""


class TokenTexts:
    """What single tokens say. Bytes of an answer's tokens, joined, are the bytes of its text."""

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer
        decoder = json.dumps(json.loads(tokenizer.tokenizer.to_str())["decoder"], ensure_ascii=False)
        self._bytes = _byte_alphabet() if '"ByteLevel"' in decoder else None
        self._fallback, self._metaspace = '"ByteFallback"' in decoder, "▁" in decoder
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def __call__(self, token: int) -> tuple[str, list[int] | None]:
        """A token's text, `bytes:\\xe2\\x80` where it is no whole character; its bytes (not of special tokens)."""
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def _read(self, token: int) -> tuple[str, list[int] | None]:
        surface = self._tokenizer.tokenizer.id_to_token(token)
        if surface is None or token in self._tokenizer.special_ids:
            return surface or "", None
        if self._bytes is not None and all(c in self._bytes for c in surface):
            raw = bytes(self._bytes[c] for c in surface)
        elif self._fallback and len(surface) == 6 and surface.startswith("<0x"):
            raw = bytes.fromhex(surface[3:5])
        else:
            raw = (surface.replace("▁", " ") if self._metaspace else surface).encode()
        try:
            return raw.decode(), list(raw)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)


def chat_logprobs(entries: Iterable[tuple[TokenLogprob, int]], texts: TokenTexts) -> dict[str, Any]:
    """Of a chat completion's choice or chunk."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text, raw = texts(token)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": raw}

    content = [
        {**one(entry.token, entry.logprob), "top_logprobs": [one(*each) for each in entry.top]} for entry, _ in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[tuple[TokenLogprob, int]], texts: TokenTexts) -> dict[str, Any]:
    """Of a completion's choice or chunk; the emitted token is always among the most likely ones, as OpenAI has it."""
    return {
        "tokens": [texts(entry.token)[0] for entry, _ in entries],
        "token_logprobs": [max(entry.logprob, LOWEST) for entry, _ in entries],
        "top_logprobs": [
            {texts(token)[0]: max(logprob, LOWEST) for token, logprob in (*entry.top, (entry.token, entry.logprob))}
            for entry, _ in entries
        ],
        "text_offset": [offset for _, offset in entries],
    }


def _byte_alphabet() -> dict[str, int]:
    """Byte of each character of a byte-level vocabulary (GPT-2's): printable ones stand for themselves."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    themselves = {chr(b): b for b in range(256) if chr(b) in alphabet}
    others = sorted(alphabet - themselves.keys())
    return themselves | dict(zip(others, (b for b in range(256) if chr(b) not in themselves), strict=True))
