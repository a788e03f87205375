"""The load generator on a server that says what it is told to."""

import asyncio
import json
import math
import socket
import threading
import time

import httpx2
import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from benchmarks import serve
from benchmarks.load import Answer, Load, Summary, arrivals, ask, closed_loop, open_loop
from benchmarks.serve import Serving

USAGE = {"completion_tokens": 6, "rounds": 4, "verified_tokens": 8, "accepted_tokens": 2}


class Fake:
    """Streams `chunks`; keeps what it was asked, and how many were with it at once."""

    def __init__(self):
        self.chunks, self.done, self.status = [delta("a"), delta(""), delta("b"), usage()], True, 200
        self.asked, self.busy, self.most, self.recompiles = [], 0, 0, 0
        routes = [
            Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "small"}]})),
            Route("/metrics", lambda _: PlainTextResponse(f"dspark_recompiles {self.recompiles}.0\n")),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
        ]
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        self.server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off"))
        threading.Thread(target=self.server.run, args=([listener],), daemon=True).start()

    async def complete(self, request):
        self.asked.append(await request.json())
        if self.status != 200:
            return JSONResponse({"error": {"message": "no room"}}, self.status)
        return StreamingResponse(self.stream(), media_type="text/event-stream")

    async def stream(self):
        self.busy += 1
        self.most = max(self.most, self.busy)
        for chunk in self.chunks:
            yield f"data: {json.dumps(chunk)}\n\n"
            await asyncio.sleep(0.01)
        if self.done:
            yield "data: [DONE]\n\n"
        self.busy -= 1


def delta(text):
    return {"choices": [{"delta": {"content": text}}]}


def usage():
    return {"choices": [], "usage": USAGE}


@pytest.fixture
def fake():
    fake = Fake()
    yield fake
    fake.server.should_exit = True


def run(fake, load, *arguments):
    """load(client, ...) with a client of the fake."""

    async def inside():
        async with httpx2.AsyncClient(base_url=fake.url) as client:
            return await load(client, *arguments)

    return asyncio.run(inside())


def test_an_answer_has_a_time_for_each_delta_with_text(fake):
    ticks = iter([1.0, 2.0, 4.0, 5.0])
    answer = run(fake, ask, {"n": 1}, lambda: next(ticks))
    assert answer == Answer(1.0, 5.0, (2.0, 4.0), USAGE)


def test_what_goes_wrong_is_told(fake):
    fake.done = False
    assert "[DONE]" in run(fake, ask, {}, time.monotonic).error
    fake.chunks = [delta("a"), {"error": {"message": "broken"}}]
    assert "broken" in run(fake, ask, {}, time.monotonic).error
    fake.status = 429
    assert run(fake, ask, {}, time.monotonic).error == '429: {"error":{"message":"no room"}}'
    fake.url = "http://127.0.0.1:9/v1"
    assert "ConnectError" in run(fake, ask, {}, time.monotonic).error


def test_a_closed_loop_keeps_as_many_as_it_has_users(fake):
    load = run(fake, closed_loop, [{"n": i} for i in range(12)], 3)
    assert sorted(body["n"] for body in fake.asked) == list(range(12)) and fake.most == 3
    assert len(load.answers) == 12 and not any(answer.error for answer in load.answers)
    assert sorted(answer.end for answer in load.answers)[-3] <= load.until
    with pytest.raises(ValueError, match="2 requests for 3 users"):
        run(fake, closed_loop, [{}, {}], 3)


def test_an_open_loop_asks_at_its_times_however_busy_the_server_is(fake):
    load = run(fake, open_loop, [{}] * 20, 1000.0, 0)
    when = arrivals(1000.0, 20, 0)
    assert all(a.start >= at for a, at in zip(load.answers, when, strict=True)) and load.until == when[-1]
    assert fake.most > 3


def test_arrivals_are_a_poisson_process_of_their_seed():
    gaps = np.diff(arrivals(4.0, 20_001, 1))
    assert gaps.min() > 0
    np.testing.assert_allclose([gaps.mean(), gaps.std()], 0.25, rtol=0.03)
    assert arrivals(4.0, 5, 1) == arrivals(4.0, 5, 1) != arrivals(4.0, 5, 2)


def test_a_summary_counts_what_came_while_the_load_was_whole():
    answers = [Answer(0, 4, (1, 2, 4), USAGE), Answer(1, 3, (2, 3), USAGE), Answer(0, 1, (1,), error="gone")]
    summary = Summary.of(Load(answers, 2.0))
    assert summary.throughput == (6 * 2 / 3 + 6 * 1 / 2) / 2
    assert summary.user_speed == (6 / 4 + 6 / 2) / 2
    assert (summary.ttft_p50, summary.gap_p50, summary.gap_max, summary.errors) == (1, 1, 2, 1)
    assert (summary.accept_length, summary.budget) == (1.5, 3.0)
    nothing = Summary.of(Load(answers[2:], 2.0))
    assert math.isnan(nothing.throughput) and math.isnan(nothing.ttft_p95) and nothing.errors == 1
    faster = Summary.of(Load(answers[1:], 2.0))
    assert Summary.median([summary, faster, faster]) == faster


def test_a_run_measures_every_point_and_writes_what_it_found(fake, tmp_path, capsys):
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps({"turns": [f"{i} + 1?"]}) + "\n" for i in range(40)))
    fake.recompiles = 2
    options = Serving(
        data=(f"math={tmp_path / 'sums.jsonl'}",),
        urls=(f"none={fake.url}", f"other={fake.url}"),
        users=(1, 2),
        rates=(500.0,),
        requests=3,
        each=2,
        repeats=2,
        out=str(tmp_path / "out"),
        json=str(tmp_path / "raw.json"),
    )
    serve.main(options)
    assert len(fake.asked) == 2 * 2 * (8 + 3 + 4 + 3)
    first = [body["messages"][0]["content"] for body in fake.asked[:18]]
    assert len(set(first)) == 18 and fake.asked[0]["model"] == "small"
    printed = capsys.readouterr().out
    assert "compiled 2.0 programs" in printed and "500 rate" in printed and printed.count("2 users") == 2
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert [row["mode"] for row in raw["loads"]] == ["none"] * 3 + ["other"] * 3
    assert all(len(row["repeats"]) == 2 for row in raw["loads"])
    for name in ("pareto.png", "budget.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_transformers_stands_beside_eight_users(capsys):
    found = [Summary.of(Load([Answer(0, 4, (1, 2, 4), USAGE)], speed)) for speed in (2.0, 1.0)]
    rates = [summary.throughput / 2 for summary in found]
    serve.console.print(serve.table({("none", "users", users): found for users in (4, 8)}, rates, 2))
    printed = capsys.readouterr().out
    assert printed.count("transformers") == 1
    cells = printed.split("transformers")[1].split("\n")[0].split("│")
    assert [cell.strip() for cell in cells[-3:-1]] == ["0.50", "0.50"]


def test_a_server_that_does_not_start_is_an_error_with_its_last_words(tmp_path):
    options = Serving(data=(), server_command="{python} -c \"raise SystemExit('no chip {policy}')\"")
    with pytest.raises(RuntimeError, match="no chip none"), serve.server(options, "none", tmp_path / "log"):
        pass
