"""Many clients of the real server at once: some ask properly, some leave, some do not read, some send nonsense."""

import asyncio
import contextlib
import http.client
import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dspark_jax import Request
from tests.serve.api.test_fuzz import bodies
from tests.serve.api.test_fuzz import check as check_answer
from tests.serve.conftest import LARGEST, MODEL, PATIENCE, Served
from tests.serve.test_server import FIRST, complete, prompt_of

LONG = {"prompt": prompt_of(60, 1), "max_tokens": 150, "ignore_eos": True}


def test_acceptance_does_not_hang_on_company(served, client):
    sizes = ((3, 1), (17, 5), (64, 9), (200, LARGEST - 200))
    asked = [dict(prompt=prompt_of(n, n), max_tokens=cap, temperature=1.2, seed=n) for n, cap in sizes]

    def ask(options):
        answer = complete(client, **options)
        return answer.choices[0].text, answer.usage.completion_tokens, answer.usage.accepted_tokens

    alone = {options["seed"]: ask(options) for options in asked}
    with ThreadPoolExecutor(4) as pool:
        for turn in range(4):
            order = asked[turn:] + asked[:turn]
            assert list(pool.map(ask, order)) == [alone[options["seed"]] for options in order]


@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_mixed_requests_side_by_side(served, target, solo, count):
    draw = random.Random(0)
    plain = [
        Request(prompt_of(draw.choice([1, 3, 17, 40, 90]), i), max_tokens=draw.choice([1, 2, 5, 9, 25, 40]),
                stop_ids=draw.choices(range(FIRST, FIRST + 37), k=draw.choice([0, 0, 2])))
        for i in range(count * 3 // 5)
    ]  # fmt: skip
    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    async def greedy(request: Request, stream: bool) -> tuple[str, str]:
        answer = await complete(client, request.prompt, max_tokens=request.max_tokens, stream=stream,
                                stop_token_ids=list(request.stop_ids))  # fmt: skip
        choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
        return "".join(choice.text for choice in choices), choices[-1].finish_reason

    async def sampled(i: int) -> None:
        options = dict(temperature=1 + i / 40, top_p=1 - i / 80, top_k=i, presence_penalty=i / 40, n=1 + i % 2, seed=i)
        answer = await complete(client, prompt_of(i, i), stop=["a", "bc"], logprobs=i % 6, **options)
        for choice in answer.choices:
            assert "a" not in choice.text and choice.finish_reason in ("stop", "length")

    async def leave(i: int) -> None:
        """Mid-stream, after so many chunks."""
        async with await complete(client, **LONG, stream=True) as chunks:
            async for chunk in chunks:
                i -= 1
                if i < 0:
                    assert chunk.choices[0].finish_reason is None
                    return

    async def disconnect(i: int) -> None:
        """Queued, in prefill, or a little later."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02 * i):
                await complete(client, **LONG)

    async def all_at_once() -> list:
        work = [greedy(request, i % 2 == 1) for i, request in enumerate(plain)]
        work += [one(i) for i in range(1, count // 10 + 1) for one in (sampled, sampled, leave, disconnect)]
        order = list(range(len(work)))
        draw.shuffle(order)
        found = await asyncio.gather(*(work[i] for i in order))
        await client.close()
        return [found for _, found in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]

    found = asyncio.run(all_at_once())
    for (text, reason), alone in zip(found, solo(plain), strict=False):
        shown = alone.tokens[:-1] if alone.finish_reason == "stop" else alone.tokens
        assert (text, reason) == (target.tokenizer.decode(shown), alone.finish_reason)


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_clients_that_leave_are_not_worked_for(served, chunks):
    """Twenty at once: some are in prefill or decode, most wait."""
    before = served.metrics()["generated_tokens_total"]
    connections = [served.connect(**LONG, stream=True) for _ in range(20)]
    for connection in connections[:4]:  # as many as run at once
        got = b""
        while got.count(b"data: ") < chunks:
            got += connection.recv(1 << 16)
    for connection in connections:
        connection.close()
    served.wait_until(served.idle)
    assert served.metrics()["generated_tokens_total"] - before < 20 * 150 / 3


def read_text(connection: socket.socket) -> str:
    """The whole answer, which must be whole."""
    got = b""
    while part := connection.recv(1 << 16):
        got += part
    assert b'"finish_reason":"length"' in got and b"data: [DONE]" in got
    events = [json.loads(line[6:]) for line in got.splitlines() if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


def test_a_client_that_does_not_read_holds_up_nobody(served, client):
    fields = dict(model=MODEL, stream=True, logprobs=20, **LONG | {"max_tokens": LARGEST - 60, "temperature": 0})
    body = json.dumps(fields).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", served.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        slow.sendall(head.encode() + body)
        served.wait_until(lambda: not served.idle())
        assert complete(client, prompt_of(5)).choices
        served.wait_until(served.idle)  # its slot and pages are free though it has read nothing
        late = read_text(slow)
    with served.connect(**fields) as connection:
        assert late == read_text(connection)


@pytest.mark.parametrize("count", [50, pytest.param(10_000, marks=pytest.mark.slow)])
def test_more_requests_than_may_wait(served, client, count):
    full = [served.connect(**LONG, n=n, stream=True) for n in (128, 128, 4)]
    served.wait_until(lambda: served.metrics()["waiting_requests"] + served.metrics()["running_requests"] > 200)

    def ask(_: int) -> int:
        try:
            complete(client, prompt_of(3), max_tokens=1)
        except openai.RateLimitError as error:
            return error.status_code if int(error.response.headers["Retry-After"]) >= 1 else 0
        return 200

    with ThreadPoolExecutor(50) as pool:
        statuses = [*pool.map(ask, range(count))]
    assert statuses.count(429) > count / 2
    for connection in full:
        connection.close()
    served.wait_until(served.idle)
    assert ask(0) == 200


numbers = st.sampled_from([0, 1, -1, 2, 0.5, 1e-300, 5e-324, 1e-45, 1e-7, 1.999999, 1e30, 1e308, -2, -1e-300])
whole = st.sampled_from([0, 1, 2, 3, 20, 21, 40, 47, 48, 320, 2**31 - 1, 2**31, 10**30, -1, -(2**63), 2**63 - 1])
requests = st.fixed_dictionaries(
    {"model": st.just(MODEL), "max_tokens": st.integers(1, 6),
     "prompt": st.lists(st.integers(0, 41), min_size=1, max_size=40)},
    optional={
        "temperature": numbers, "top_p": numbers, "min_p": numbers, "repetition_penalty": numbers, "top_k": whole,
        "presence_penalty": numbers, "frequency_penalty": numbers, "seed": whole, "min_tokens": whole,
        "logprobs": whole, "n": st.integers(1, 3), "ignore_eos": st.booleans(), "stream": st.booleans(),
        "logit_bias": st.dictionaries(st.integers(0, 41).map(str), st.sampled_from([-100, 100, 1e-300, 0])),
        "stop_token_ids": st.lists(st.integers(0, 41), max_size=40), "speculative": st.booleans(),
        "stop": st.lists(st.text("ab é", min_size=1, max_size=3), max_size=3),
    },
)  # fmt: skip
FIXTURE = [HealthCheck.function_scoped_fixture]


@pytest.fixture
def connection(served: Served):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE)
    yield connection
    connection.close()
    assert served.raw("GET", "/health")[0] == 200


def send(connection: http.client.HTTPConnection, fields: dict) -> None:
    check_answer(connection, "/v1/completions", json.dumps(fields).encode())


@settings(max_examples=150, suppress_health_check=FIXTURE)
@given(requests)
@example({"model": MODEL, "prompt": [5], "max_tokens": 5, "repetition_penalty": 1e-300, "temperature": 1})
@example({"model": MODEL, "prompt": [5], "max_tokens": 5, "repetition_penalty": 1e308, "logprobs": 20})
@example({"model": MODEL, "prompt": [5], "max_tokens": 5, "logit_bias": {str(i): -100 for i in range(40)}})
def test_any_parameters_are_taken_or_refused(connection, fields):
    send(connection, fields)


@pytest.mark.slow
@settings(max_examples=5000, suppress_health_check=FIXTURE)
@given(requests)
def test_many_parameters_are_taken_or_refused(connection, fields):
    send(connection, fields)


@pytest.mark.slow
@settings(max_examples=5000, suppress_health_check=FIXTURE)
@given(bodies())
def test_many_bodies_are_answered_or_refused(connection, sent):
    check_answer(connection, *sent)
