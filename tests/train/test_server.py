"""Answers of a server: which rows they become, and what happens when it fails, refuses or is killed half-way."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from configs.tiny import SPECIAL, TEMPLATE, write_prompts
from dspark_jax.tokenizer import ChatTokenizer
from train.answers import request_seed
from train.data import ChatOptions, RowReader, read_documents
from train.regenerate import Regenerate
from train.server import Refused, Server


class Fake:
    """A server whose `say(request)` is a status and a body; it keeps what it was asked."""

    def __init__(self):
        self.asked, self.headers, self.say, self.busy, self.most = [], [], answer, 0, 0
        fake, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    fake.asked.append(request)
                    fake.headers.append((self.path, dict(self.headers)))
                    fake.busy += 1
                    fake.most = max(fake.most, fake.busy)
                status, body = fake.say(request)
                with lock:
                    fake.busy -= 1
                body = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


def answer(request, reason="stop", **message):
    text = request["messages"][-1]["content"][::-1]
    message = {"role": "assistant", "content": text, "tool_calls": [], "refusal": None, **message}
    return 200, {"choices": [{"message": message, "finish_reason": reason}], "usage": {"completion_tokens": 3}}


@pytest.fixture
def fake():
    fake = Fake()
    yield fake
    fake.http.shutdown()
    fake.http.server_close()


@pytest.fixture
def command(fake, tmp_path):
    """command(**fields): asks the server five prompts."""
    write_prompts(tmp_path / "sums.jsonl", count=5)
    defaults = dict(server=fake.url, model="big", temperature=1.0, max_tokens=12, concurrency=3)
    defaults |= {"prompts": (str(tmp_path / "sums.jsonl"),), "out": str(tmp_path / "out" / "answers.jsonl")}
    return lambda **fields: Regenerate(**{**defaults, **fields})


def rows_of(path):
    with open(path) as file:
        return {row["index"]: row for row in map(json.loads, file)}


def test_answers_are_conversations_and_say_how_they_were_asked(command, fake, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    assert command(thinking=False).run() == 5
    rows = rows_of(command().out)
    prompts = [json.loads(line)["turns"][0] for line in (tmp_path / "sums.jsonl").read_text().splitlines()]
    template = {"enable_thinking": False}
    for i, prompt in enumerate(prompts):
        said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": prompt[::-1]}]
        assert rows[i]["messages"] == said and rows[i]["finish_reason"] == "stop"
        assert rows[i]["chat_template_kwargs"] == template
        assert rows[i]["settings"] == dict(model="big", temperature=1.0, max_tokens=12, seed=0, thinking=False)
    expected = {"model": "big", "temperature": 1.0, "max_tokens": 12, "chat_template_kwargs": template}
    assert all(expected.items() <= request.items() for request in fake.asked)
    assert len({request["seed"] for request in fake.asked}) == 5
    path, headers = fake.headers[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer sesame"


def test_answers_are_learnt_from_as_they_ended(command, fake, chat):
    fake.say = lambda request: answer(request, "length" if "1" in request["messages"][-1]["content"] else "stop")
    command().run()
    for (tokens, supervised), row in zip(documents(command().out, chat), rows_of(command().out).values(), strict=True):
        text = row["messages"][-1]["content"] + ("" if row["finish_reason"] == "length" else SPECIAL[0])
        assert tokens[supervised].tolist() == chat.encode(text)


@pytest.fixture
def chat(tiny_directory):
    return ChatTokenizer.from_directory(tiny_directory)


def documents(path, chat):
    assert chat.template == TEMPLATE
    return read_documents([path], RowReader(chat, chat.num_tokens, ChatOptions()))


def test_conversations_are_asked_up_to_their_first_answer(command, fake, tmp_path):
    system, user, old = ({"role": r, "content": r} for r in ("system", "user", "assistant"))
    rows = [{"messages": [system, user, old, user, old], "tools": [{"name": "f"}]}, {"messages": [old]}]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fake.say = lambda request: answer(request, content=None, tool_calls=[{"id": "1"}], reasoning_content="hm")
    assert command(prompts=(str(path),)).run() == 1
    assert fake.asked[0]["messages"] == [system, user] and fake.asked[0]["tools"] == [{"name": "f"}]
    row = rows_of(command().out)[0]
    said = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}], "reasoning_content": "hm"}
    assert row["messages"] == [system, user, said] and row["tools"] == [{"name": "f"}]


def test_a_killed_run_asks_what_is_left(command, fake):
    fake.say = lambda request: answer(request) if len(fake.asked) < 4 else (401, {"error": "expired"})
    with pytest.raises(ValueError, match=r"answers 401 .*expired.*has the model 'big'.*\$OPENAI_API_KEY"):
        command(concurrency=1).run()
    first = rows_of(command().out)
    with open(command().out, "a") as file:
        file.write('{"half')
    assert len(first) == 3
    fake.say = answer
    fake.asked.clear()
    assert command().run() == 2 == len(fake.asked)
    assert first.items() <= rows_of(command().out).items() and len(rows_of(command().out)) == 5
    assert command().run() == 0
    for changed in ({"model": "other"}, {"thinking": True}, {"temperature": 0.5}):
        with pytest.raises(ValueError, match="was answered with other settings"):
            command(**changed).run()
    write_prompts(command().prompts[0], count=5, seed=9)
    with pytest.raises(ValueError, match="answers other prompts"):
        command().run()


def test_prompts_that_the_server_refuses_are_counted(command, fake, capsys):
    refused = request_seed(0, "sums", 0)
    fake.say = lambda request: (400, {"error": "too long"}) if request["seed"] == refused else answer(request)
    assert command().run() == 4 and 0 not in rows_of(command().out)
    said = " ".join(capsys.readouterr().err.split())
    assert "1 prompts were refused" in said and "too long" in said


def test_requests_run_at_a_time(fake):
    fake.say = lambda request: time.sleep(0.2) or answer(request)
    requests = {i: {"messages": [{"content": str(i)}]} for i in range(8)}
    assert {name for name, _ in Server(fake.url, concurrency=4).answer_all(requests)} == set(range(8))
    assert 1 < fake.most <= 4


@pytest.mark.parametrize("status", [429, 500, 503])
def test_failures_that_pass_are_tried_again(fake, status):
    fake.say = lambda request: (status, {}) if len(fake.asked) < 3 else answer(request)
    ((_, said),) = Server(fake.url, backoff=0.01).answer_all({0: {"messages": [{"content": "ab"}]}})
    assert said.message == {"role": "assistant", "content": "ba"} and said.tokens == 3 and len(fake.asked) == 3


def test_a_server_that_keeps_failing_ends_the_run(fake):
    fake.say = lambda request: (503, {"error": "loading"})
    with pytest.raises(OSError, match=r"failed 3 times, the last time with 503 .*loading.*start again to go on"):
        list(Server(fake.url, backoff=0.01, retries=2).answer_all({0: {"messages": []}}))
    assert len(fake.asked) == 3
    fake.http.server_close()
    with pytest.raises(OSError, match="failed 1 times, the last time with URLError"):
        list(Server("http://127.0.0.1:9", retries=0).answer_all({0: {}}))


@pytest.mark.parametrize("body", [b"<html>", {"choices": []}, {"choices": [{"message": {}}]}, [1]])
def test_what_is_no_chat_completion_is_refused(fake, body):
    fake.say = lambda request: (200, body)
    with pytest.raises(ValueError, match=r"expected a chat completion with choices\[0\]\.message"):
        list(Server(fake.url).answer_all({0: {"messages": []}}))


def test_a_refusal_names_its_reason(fake):
    fake.say = lambda request: (422, {"error": "no such role"})
    ((_, said),) = Server(fake.url).answer_all({0: {"messages": []}})
    assert isinstance(said, Refused) and "no such role" in said.reason


@pytest.mark.parametrize("fields", [{"server": None}, {"model": None}, {"concurrency": 0}], ids=str)
def test_half_an_address_is_refused(command, fields):
    with pytest.raises(ValueError, match=r"--server and --model go together|--concurrency must be"):
        command(**fields)
