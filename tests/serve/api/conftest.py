"""A server on a loopback port, whose engine says what a test scripts."""

import asyncio
import dataclasses
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dspark_jax.tokenizer import ChatTokenizer
from serve.api.app import create_app
from serve.api.server import Server
from serve.engine.request import FinishReason, Output, QueueFull, ServeRequest, TokenLogprob, Usage

TEMPLATE = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' and not m.content %}{{ raise_exception('an empty result') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}<eos>{% endfor %}"
    "<assistant>{% if enable_thinking is false %}</think>{% endif %}"
)
H, EYE, END = 71, 72, 256  # of the tokenizer below
MAX_LENGTH = 512


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    """Byte-level: a token a byte, but for `ab` and half an emoji, then <eos>."""
    merges = [("a", "b"), ("ð", "Ł")]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return ChatTokenizer(tokenizer, template=TEMPLATE, eos_token="<eos>")


@dataclasses.dataclass(eq=False)
class FakeStream:
    """Outputs of a script.

    Its steps: a block of tokens, (the last block, finish reason), seconds to wait, or an exception to raise.
    """

    engine: "FakeEngine"
    request: ServeRequest
    script: list

    def __post_init__(self):
        self.usage = Usage(len(self.request.prompt), cached_tokens=1)
        self.steps = iter(self.script)

    def __aiter__(self):
        return self

    async def __anext__(self) -> Output:
        for step in self.steps:
            if isinstance(step, int | float):
                await asyncio.sleep(step)
            elif isinstance(step, Exception):
                self.engine.open.remove(self)
                raise step
            else:
                return self._output(*step) if isinstance(step, tuple) else self._output(step)
        raise StopAsyncIteration

    def _output(self, block: list[int], reason: FinishReason | None = None) -> Output:
        u = self.usage
        self.usage = dataclasses.replace(
            u, completion_tokens=u.completion_tokens + len(block), rounds=u.rounds + 1, drafted=u.drafted + 7,
            verified=u.verified + 5, accepted=u.accepted + max(len(block) - 1, 0),
        )  # fmt: skip
        if reason is not None:
            self.engine.open.remove(self)
        top = self.request.logprobs
        return Output(block, self.usage, None if top is None else [logprob(t, top) for t in block], reason)

    def cancel(self) -> None:
        if self in self.engine.open:
            self.engine.open.remove(self)
            self.engine.cancelled.append(self)


def logprob(token: int, top: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, tuple((token + i, -0.5 - i if i < 3 else -float("inf")) for i in range(top)))


class FakeEngine:
    """Keeps what it was asked; `script(request)` is what it says."""

    max_length = MAX_LENGTH
    capacity = 264

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.healthy = True
        self.script: Callable[[ServeRequest], list] = lambda request: [[H], ([EYE, END], "stop")]
        self.requests: list[ServeRequest] = []
        self.cancelled: list[FakeStream] = []
        self.open: set[FakeStream] = set()
        self.limit = 10**9
        self.refusal: ValueError | None = None

    def submit(self, request: ServeRequest) -> FakeStream:
        if self.refusal is not None:
            raise self.refusal
        if len(self.open) >= self.limit:
            raise QueueFull(len(self.open), 2.2)
        stream = FakeStream(self, request, self.script(request))
        self.requests.append(request)
        self.open.add(stream)
        return stream


@dataclasses.dataclass
class Served:
    """A running server."""

    server: Server
    engine: FakeEngine
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def says(self, *script) -> None:
        self.engine.script = lambda request: list(script)


@contextmanager
def running_server(tokenizer: ChatTokenizer, **options) -> Iterator[Served]:
    """A server in a thread."""
    engine = FakeEngine()
    ours = {name: options.pop(name) for name in ("drain_seconds", "timeout_graceful_shutdown") if name in options}
    server = Server(create_app(engine, tokenizer, "tiny", **options), host="127.0.0.1", port=0, **ours)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield Served(server, engine, server.servers[0].sockets[0].getsockname()[1])
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


def blocks(tokenizer, text, size=1, reason="length"):
    """Text as blocks of tokens, ended by `reason`."""
    ids = tokenizer.encode(text)
    cut = [ids[i : i + size] for i in range(0, len(ids), size)]
    return [*cut[:-1], (cut[-1], reason)]


def raw(served: Served, method: str, path: str, body: bytes | str | None = None, **headers):
    """Status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=600)
    connection.request(method, path, body, headers)
    reply = connection.getresponse()
    told = reply.status, reply.headers, reply.read()
    connection.close()
    return told


def wait_until(holds: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.002)


@pytest.fixture(scope="session")
def _served(tokenizer):
    with running_server(tokenizer, max_body_bytes=100_000) as served:
        yield served


@pytest.fixture
def served(_served):
    """The server, as new; nothing may be left running in its engine."""
    wait_until(lambda: not _served.server.serving.active)
    _served.engine.reset()
    yield _served
    wait_until(lambda: not _served.server.serving.active)
    assert not _served.engine.open


@pytest.fixture(scope="session")
def _client(_served):
    with openai.OpenAI(base_url=f"{_served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def client(_client, served):
    return _client
