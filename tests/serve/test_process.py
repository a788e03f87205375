"""The server's process: killed, told to end, started again."""

import json
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from dspark_jax import Request
from tests.serve.conftest import MODEL, PATIENCE, ROOT, Served, running_server
from tests.serve.test_server import complete, prompt_of

ASKED = [Request(prompt_of(10 + i, i), max_tokens=150, ignore_eos=True) for i in range(12)]


def ask(served: Served, i: int) -> tuple[str, str | None]:
    """Text, as far as it came, and how it ended; None: it did not."""
    stream, said = i % 2 == 0, ""
    with served.client() as client:
        try:
            answer = complete(client, ASKED[i].prompt, max_tokens=ASKED[i].max_tokens, ignore_eos=True, stream=stream)
            if not stream:
                return answer.choices[0].text, answer.choices[0].finish_reason
            for chunk in answer:
                said += chunk.choices[0].text
                if chunk.choices[0].finish_reason is not None:
                    return said, chunk.choices[0].finish_reason
        except openai.APIConnectionError:
            pass
        return said, None


@pytest.mark.slow
def test_killed_and_started_again_then_told_to_end(checkpoints, target, solo):
    whole = [target.tokenizer.decode(alone.tokens) for alone in solo(ASKED)]
    costs = checkpoints / "costs.json"
    with running_server(checkpoints, "--costs", f"{costs}") as served, ThreadPoolExecutor(len(ASKED)) as pool:
        asked = [pool.submit(ask, served, i) for i in range(len(ASKED))]
        served.wait_until(lambda: served.metrics()["generated_tokens_total"] > 20)
        served.process.send_signal(signal.SIGKILL)
        found = [future.result() for future in asked]
    broken = [text for text, reason in found if reason is None]
    assert len(broken) > 6
    assert all(text == whole[i] for i, (text, reason) in enumerate(found) if reason is not None)
    assert all(whole[i].startswith(text.rstrip("\ufffd")) for i, (text, _) in enumerate(found))

    measured = costs.read_bytes()
    with (
        running_server(checkpoints, "--costs", f"{costs}", port=served.port) as again,
        ThreadPoolExecutor(len(ASKED)) as pool,
    ):
        asked = [pool.submit(ask, again, i) for i in range(len(ASKED))]
        again.wait_until(lambda: again.metrics()["generated_tokens_total"] > 20)
        again.process.send_signal(signal.SIGTERM)
        again.wait_until(lambda: again.raw("GET", "/health")[0] == 503)
        status, headers, text = again.raw("POST", "/v1/completions", json.dumps({"model": MODEL, "prompt": "a"}))
        assert status == 503 and headers["Retry-After"] and b"takes no requests now" in text
        assert [future.result() for future in asked] == [(text, "length") for text in whole]
        assert again.process.wait(PATIENCE) == 0
        assert "Traceback" not in again.log.read_text() and costs.read_bytes() == measured


@pytest.mark.slow
def test_mistakes_are_told_in_one_line(checkpoints):
    def start(*options: str) -> str:
        models = ["--target", str(checkpoints / "target"), "--drafter", "none"]
        command = [sys.executable, "-m", "serve", *models, *options]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert ended.returncode == 2 and "Traceback" not in ended.stderr
        return ended.stderr

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "in use" in start("--port", f"{taken.getsockname()[1]}")
    assert "and floor must be" in start("--floor", "-1")
