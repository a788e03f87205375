"""Clients that send too much, leave, or do not read; an engine that is full, fails, or ends."""

import itertools
import json
import logging
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import openai
import pytest

from tests.serve.api.conftest import END, H, Served, raw, running_server, wait_until

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def body(**fields) -> str:
    return json.dumps({"model": "tiny", "messages": MESSAGES, **fields})


def alive(served: Served) -> bool:
    """Whether a usual request is answered as usual."""
    served.engine.reset()
    return json.loads(raw(served, "POST", CHAT, body())[2])["choices"][0]["message"]["content"] == "hi"


def send(served: Served, text: str, path: str = CHAT, length: int | None = None) -> socket.socket:
    """A connection on which a request was sent."""
    connection = socket.create_connection(("127.0.0.1", served.port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text) if length is None else length}\r\n\r\n"
    connection.sendall(head.encode() + text.encode())
    return connection


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    got = b""
    while mark not in got:
        part = connection.recv(1 << 16)
        assert part, got
        got += part
    return got


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_body_over_the_limit(served, path):
    huge = b'{"model": "tiny", "prompt": "' + b"a" * 10_000_000 + b'"}'
    status, _, text = raw(served, "POST", path, huge)
    assert status == 413 and json.loads(text)["error"]["code"] == "body_too_long"
    status, _, text = raw(served, "POST", path, iter([huge]))  # chunked: its length is not told before
    assert status == 413 and "100000 bytes" in json.loads(text)["error"]["message"]
    # Refused on its length alone.
    with send(served, "", path, length=10**12) as connection:
        assert read_until(connection, b"body_too_long").startswith(b"HTTP/1.1 413")
    assert alive(served)


def test_long_prompts_are_encoded_beside_the_loop(served, client):
    served.says(([H], "length"))
    text = "a" * 50_000
    with pytest.raises(openai.BadRequestError, match=r"The prompt has 50000 tokens; at most 511 fit") as caught:
        client.completions.create(model="tiny", prompt=text)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    ("method", "path", "sent", "status", "says"),
    [
        ("POST", CHAT, "{", 400, "not valid JSON"),
        ("POST", CHAT, '{"model": "tiny"}', 400, "messages is required"),
        ("POST", CHAT, body(model="gpt-4"), 404, "no model 'gpt-4'"),
        ("GET", CHAT, None, 405, "Method Not Allowed"),
        ("POST", "/v1/models", "{}", 405, "Method Not Allowed"),
        ("POST", "/v1/embeddings", "{}", 404, "POST /v1/embeddings: Not Found"),
        ("POST", CHAT + "/", body(), 404, "Not Found"),
        ("GET", "/", None, 404, "Not Found"),
    ],
)
def test_refusals_have_the_form_of_openai(served, method, path, sent, status, says):
    got, headers, text = raw(served, method, path, sent)
    error = json.loads(text)["error"]
    assert got == status and says in error["message"] and error["type"] == "invalid_request_error"
    assert error.keys() == {"message", "type", "param", "code"}
    assert status != 405 or headers["Allow"]


def test_what_the_engine_refuses_is_a_400(served, client):
    served.engine.refusal = ValueError("a request of 9 pages, but the pool has 8.")
    with pytest.raises(openai.BadRequestError, match="9 pages"):
        client.chat.completions.create(model="tiny", messages=MESSAGES)


def test_full_queue_is_a_429_and_leaves_nothing_behind(served, client):
    served.engine.limit = 2
    with pytest.raises(openai.RateLimitError, match="2 requests wait already") as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, stream=True)
    assert caught.value.response.headers["Retry-After"] == "3" and caught.value.type == "rate_limit_error"
    wait_until(lambda: len(served.engine.cancelled) == 2)


def test_more_answers_than_ever_fit_are_no_matter_of_trying_again(served, client, monkeypatch):
    monkeypatch.setattr(served.engine, "capacity", 4)
    with pytest.raises(openai.BadRequestError, match="asks for 5 answers; at most 4 run and wait"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, n=5)
    assert not served.engine.requests


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_more_requests_than_may_wait(served, count):
    served.engine.limit = 20
    gate = threading.Event()
    served.engine.script = lambda request: Gated(gate)
    with ThreadPoolExecutor(50) as pool:
        asked = [pool.submit(raw, served, "POST", CHAT, body()) for _ in range(count)]
        refused = [future.result()[0] for future in itertools.islice(as_completed(asked), count - 20)]
        gate.set()
        assert set(refused) == {429}
        statuses = [future.result()[0] for future in asked]
    assert (statuses.count(200), statuses.count(429)) == (20, count - 20)
    wait_until(lambda: not served.engine.open)
    assert alive(served)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_clients_that_leave_free_their_requests(served, stream, n):
    for waits in ([60], [[H], 60], [[H], [H], 0.01, [H], 60]):
        served.says(*waits)
        for _ in range(7):
            served.engine.cancelled.clear()
            with send(served, body(stream=stream, n=n)) as connection:
                if stream and waits[0] == [H]:
                    read_until(connection, b'"content":"h"')
                wait_until(lambda: len(served.engine.open) == n)
            wait_until(lambda: len(served.engine.cancelled) == n)
            assert not served.engine.open
    assert alive(served)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ([RuntimeError("boom")], "The engine failed"),
        ([[H], RuntimeError("boom")], "The engine failed"),
        ([[H]], "broke the answer off"),
        ([[H], ([], "error")], "broken off .error."),
        ([([H], "abort")], "broken off .abort."),
    ],
)
def test_engine_that_fails_gives_an_error_and_never_a_whole_answer(served, client, script, says, caplog):
    served.says(*script)
    with pytest.raises(openai.InternalServerError, match=says):
        client.chat.completions.create(model="tiny", messages=MESSAGES, n=2)
    for fields in ({"messages": MESSAGES}, {"prompt": "x"}):
        ask = client.chat.completions.create if "messages" in fields else client.completions.create
        with pytest.raises(openai.APIError, match=says):
            list(ask(model="tiny", stream=True, **fields))
    assert b"[DONE]" not in raw(served, "POST", CHAT, body(stream=True))[2]
    served.engine.open.clear()
    assert alive(served)


def test_engine_that_is_down(served, client):
    served.engine.healthy = False
    assert raw(served, "GET", "/health")[0] == 503
    with pytest.raises(openai.InternalServerError, match="takes no requests now") as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert caught.value.status_code == 503 and caught.value.response.headers["Retry-After"] == "10"
    served.engine.healthy = True
    assert raw(served, "GET", "/health")[0] == 200


def test_requests_are_logged_as_json(served, client, caplog):
    with caplog.at_level(logging.INFO, "serve.api"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, user="me")
        wait_until(lambda: any(r.name == "serve.api.generate" for r in caplog.records))
    line = json.loads(next(r.message for r in caplog.records if r.name == "serve.api.generate"))
    assert line["outcome"] == "ok" and line["user"] == "me" and line["completion_tokens"] == 3


@pytest.mark.parametrize(("script", "outcome"), [([[H], RuntimeError()], "error"), ([[H], 60], "gone")])
def test_requests_that_do_not_end_well_are_logged_too(served, caplog, script, outcome):
    served.says(*script)
    with caplog.at_level(logging.INFO, "serve.api"), send(served, body(stream=True)) as connection:
        read_until(connection, b'"content":"h"')
        if outcome == "gone":
            connection.close()
        wait_until(lambda: any(f'"outcome":"{outcome}"' in r.message for r in caplog.records))


def test_only_bearers_of_the_key_are_let_in(tokenizer):
    with running_server(tokenizer, api_key="sesame") as served:
        for given in ({}, {"Authorization": "Bearer sesam"}, {"Authorization": "sesame"}):
            for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("POST", "/v1/nothing")):
                status, headers, text = raw(served, method, path, **given)
                assert status == 401 and json.loads(text)["error"]["code"] == "invalid_api_key"
                assert headers["WWW-Authenticate"] == "Bearer"
        for given in ("Bearer sesame", "bearer  sesame"):
            assert raw(served, "GET", "/v1/models", Authorization=given)[0] == 200
        assert raw(served, "GET", "/health")[0] == raw(served, "GET", "/metrics")[0] == 200


def test_a_key_is_compared_byte_by_byte(tokenizer):
    with running_server(tokenizer, api_key="clé\n") as served:
        assert raw(served, "GET", "/v1/models", Authorization="Bearer clé".encode())[0] == 200
        assert raw(served, "GET", "/v1/models", Authorization="Bearer clé".encode("latin-1"))[0] == 401


@pytest.fixture(scope="module")
def hasty(tokenizer):
    """A server that waits half a second for a client."""
    with running_server(tokenizer, client_timeout=0.5) as served:
        yield served


def test_client_that_does_not_read_holds_up_nobody_and_is_given_up(hasty):
    hasty.says(*[[H] * 20] * 400, 60)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", hasty.port))
    text = body(stream=True, logprobs=True, top_logprobs=20)
    connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
    wait_until(lambda: len(hasty.engine.open) == 1)
    slow = next(iter(hasty.engine.open))
    hasty.says(([H, END], "stop"))
    for _ in range(5):
        assert raw(hasty, "POST", CHAT, body(stream=True))[0] == 200
    wait_until(lambda: slow in hasty.engine.cancelled)
    assert slow.usage.completion_tokens < 20 * 400
    connection.close()


def test_body_that_does_not_come_is_given_up(hasty):
    with send(hasty, "{", length=50) as connection:
        assert read_until(connection, b"did not come in time").startswith(b"HTTP/1.1 408")


def test_draining_server_finishes_what_runs_and_takes_nothing_new(tokenizer):
    with running_server(tokenizer, drain_seconds=30) as served:
        gate = threading.Event()
        served.engine.script = lambda request: Gated(gate)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(raw, served, "POST", CHAT, body(stream=True))
            wait_until(lambda: bool(served.engine.open))
            served.server.handle_exit(signal.SIGTERM, None)
            status, headers, text = raw(served, "POST", CHAT, body())
            assert status == 503 and headers["Retry-After"] == "10" and b"takes no requests" in text
            status, _, text = raw(served, "GET", "/health")
            assert status == 503 and json.loads(text) == {"status": "draining"}
            time.sleep(0.3)  # ticks of the server
            assert not served.server.should_exit
            gate.set()
            assert running.result()[2].endswith(b"data: [DONE]\n\n")
        wait_until(lambda: served.server.should_exit)


@pytest.mark.parametrize("again", [True, False])
def test_draining_ends_in_time_or_when_told_again(tokenizer, again):
    with running_server(tokenizer, drain_seconds=30 if again else 0, timeout_graceful_shutdown=0.1) as served:
        served.says(60)
        with send(served, body(stream=True)):
            wait_until(lambda: bool(served.engine.open))
            served.server.drain()
            if again:
                served.server.handle_exit(signal.SIGTERM, None)
            wait_until(lambda: len(served.engine.cancelled) == 1)


class Gated:
    """A script that goes on once the gate is open."""

    def __init__(self, gate: threading.Event):
        self.gate = gate

    def __iter__(self):
        yield [H]
        while not self.gate.is_set():
            yield 0.01
        yield ([H, END], "stop")
