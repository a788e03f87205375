"""Answers of an OpenAI-compatible server, many at a time."""

import dataclasses
import http.client
import json
import os
import queue
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

PASSING = {408, 409, 425, 429}
"""Statuses that pass, as those from 500 on do."""
OF_THE_REQUEST = {400, 413, 422}
"""Statuses of one request that the server cannot answer, such as one that is too long."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A message of the assistant; `length` as the reason if it was cut off."""

    message: dict[str, Any]
    finish_reason: str
    tokens: int


@dataclasses.dataclass(frozen=True)
class Refused:
    """What the server said to a request that it cannot answer."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Server:
    """A server of chat completions.

    Attributes:
      url: its base, such as http://localhost:8000/v1; a key in $OPENAI_API_KEY is sent along.
      concurrency: requests at a time; retries: further attempts at each, `backoff` seconds apart, doubling up to a
        minute; timeout: seconds of one attempt.
    """

    url: str
    concurrency: int = 32
    retries: int = 6
    backoff: float = 1.0
    timeout: float = 600.0

    def answer_all(self, requests: Mapping[Any, dict[str, Any]]) -> Iterator[tuple[Any, Answer | Refused]]:
        """Name and answer of each request (the fields of a chat completion), in the order they come.

        Raises:
          OSError: the server cannot be reached, or fails again and again; ValueError: it refuses all requests of this
            kind (no such model, no permission), or answers with something else.
        """
        waiting, lock, stop = iter(requests.items()), threading.Lock(), threading.Event()
        done: queue.Queue[tuple[Any, Answer | Refused | Exception]] = queue.Queue()

        def work() -> None:
            while not stop.is_set():
                with lock:
                    name, request = next(waiting, (None, None))
                if request is None:
                    return
                try:
                    done.put((name, self._answer(request, stop)))
                except Exception as error:  # raised again by whoever reads the answers
                    stop.set()
                    done.put((name, error))

        # Daemons: a request that takes minutes does not keep a command alive that was told to end.
        for _ in range(min(self.concurrency, len(requests))):
            threading.Thread(target=work, daemon=True).start()
        try:
            for _ in range(len(requests)):
                name, answer = done.get()
                if isinstance(answer, Exception):
                    raise answer
                yield name, answer
        finally:
            stop.set()

    def _answer(self, request: dict[str, Any], stop: threading.Event) -> Answer | Refused:
        for attempt in range(self.retries + 1):
            try:
                return _read(self._post(request))
            except urllib.error.HTTPError as error:
                said = f"{error.code} {error.reason}: {error.read()[:300].decode(errors='replace')}"
                if error.code in OF_THE_REQUEST:
                    return Refused(said)
                if error.code < 500 and error.code not in PASSING:
                    raise ValueError(
                        f"{self.url} answers {said}; expected an OpenAI-compatible server that has the model "
                        f"{request.get('model')!r}. A key is taken from $OPENAI_API_KEY."
                    ) from error
                wait = error.headers.get("Retry-After", "")
            except (OSError, http.client.HTTPException) as error:
                said, wait = f"{type(error).__name__}: {error}", ""
            # Spread, so that requests that failed together do not all come back together.
            pause = min(self.backoff * 2**attempt, 60) * random.uniform(0.5, 1)
            if attempt < self.retries and stop.wait(max(pause, float(wait) if wait.isdigit() else 0)):
                break
        raise OSError(f"{self.url} failed {self.retries + 1} times, the last time with {said}; start again to go on.")

    def _post(self, request: dict[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        url = f"{self.url.rstrip('/')}/chat/completions"
        body = json.dumps(request).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=self.timeout) as reply:
            return reply.read()


def _read(reply: bytes) -> Answer:
    try:
        body = json.loads(reply)
        choice = body["choices"][0]
        message = {k: v for k, v in choice["message"].items() if v not in (None, [], {})}
        if not isinstance(message.get("content", ""), str) or message.keys() <= {"role"}:
            raise TypeError("a message without content")
        usage = body.get("usage") or {}
        return Answer(
            {**message, "role": "assistant", "content": message.get("content", "")},
            str(choice.get("finish_reason")),
            int(usage.get("completion_tokens") or 0),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the server answered {reply[:200].decode(errors='replace')!r} ({error}); expected a chat completion with "
            "choices[0].message."
        ) from error
