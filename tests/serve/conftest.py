"""The real server: a process on a loopback port, with the tiny target and a random drafter."""

import dataclasses
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from flax import nnx
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from configs.tiny import SPECIAL, TARGET, write_target
from dspark_jax import DrafterConfig, DSpark, Generation, Generator, Request
from dspark_jax.checkpoints.drafter import save_drafter
from dspark_jax.checkpoints.target import LoadedTarget, load_target
from tests.conftest import PROGRAMS

G = 3
MODEL = "tiny"
MAX_LENGTH, PAGE, PAGES = 256, 8, 30
LARGEST = PAGE * (PAGES - 1) - 2 * (1 + G)
"""Positions of the largest request that the pool has pages for; one page is nobody's."""
SIZES = ["--slots", "4", "--rows", "16", "--chunk", "16", "--max-length", f"{MAX_LENGTH}",
         "--page-size", f"{PAGE}", "--pages", f"{PAGES}"]  # fmt: skip
CHARACTERS = "é€😀"
TOKENS = [*"abcdefghijklmnopqrstuvwxyz", "0", " ", *(bytes([b]) for b in CHARACTERS.encode())]
PATIENCE = 1200
"""Seconds after which something hangs, on whatever machine."""
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Path:
    """A directory with target/ and drafter/. The target's tokens are letters and single bytes of `CHARACTERS`."""
    directory = tmp_path_factory.mktemp("served")
    write_target(directory / "target")
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelt = [byte.pre_tokenize_str(c)[0][0] for c in TOKENS if isinstance(c, str)]
    spelt += [c for c, _ in zip(byte.pre_tokenize_str(CHARACTERS)[0][0], CHARACTERS.encode(), strict=True)]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate([*SPECIAL, *spelt])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(directory / "target" / "tokenizer.json"))
    config = DrafterConfig(
        vocab_size=TARGET["vocab_size"], hidden_size=TARGET["hidden_size"], intermediate_size=32, num_layers=1,
        num_heads=2, num_kv_heads=1, head_dim=8, block_size=G, tap_ids=(0, 1), mask_token_id=47,
        num_target_layers=TARGET["num_hidden_layers"], markov_rank=4, confidence_head=True,
        confidence_with_markov=True, draft_vocab_size=32,
    )  # fmt: skip
    save_drafter(directory / "drafter", DSpark(config, rngs=nnx.Rngs(1)))
    return directory


@pytest.fixture(scope="session")
def target(checkpoints) -> LoadedTarget:
    """The served target, in the test's process."""
    return load_target(checkpoints / "target")


@pytest.fixture(scope="session")
def solo(target) -> Callable[[Sequence[Request]], list[Generation]]:
    """Plain generations of requests, each with nothing beside it that could change it."""
    generator = Generator(target.model, max_length=MAX_LENGTH)

    def run(requests: Sequence[Request]) -> list[Generation]:
        return [generator.generate([request])[0] for request in requests]

    return run


@dataclasses.dataclass
class Served:
    """A server's process."""

    process: subprocess.Popen
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def raw(self, method: str, path: str, body: bytes | str | None = None, **headers) -> tuple[int, Any, bytes]:
        """Status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            return reply.status, reply.headers, reply.read()
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Values by name, those with labels left out."""
        text = self.raw("GET", "/metrics")[2].decode()
        return {name: float(value) for name, value in re.findall(r"^dspark_(\w+) (\S+)$", text, re.MULTILINE)}

    def client(self, **options) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE, **options)

    def connect(self, path: str = "/v1/completions", **fields) -> socket.socket:
        """A connection on which a request was sent."""
        body = json.dumps({"model": MODEL, **fields}).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection

    def idle(self) -> bool:
        """Whether nothing runs, waits or holds a page."""
        now = self.metrics()
        return now["running_requests"] == now["waiting_requests"] == now["pages_used"] == 0

    def compiled_late(self) -> list[str]:
        """What was compiled behind the start, be it not a program of a step."""
        lines = self.log.read_text().partition("serving on")[2].splitlines()
        return [line for line in lines if "Finished XLA compilation" in line]

    def wait_until(self, holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, f"it did not come to pass: {self.metrics()}\n{self.log.read_text()[-4000:]}"
            time.sleep(0.01)


@contextmanager
def running_server(checkpoints: Path, *options: str, port: int | None = None) -> Iterator[Served]:
    """Starts `python -m serve` and waits until it serves; kills it in the end."""
    if port is None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    command = ["-m", "serve", "--target", checkpoints / "target", "--drafter", checkpoints / "drafter", "--name", MODEL]
    settings = {"DSPARK_CACHE": f"{PROGRAMS}", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu",
                "JAX_LOG_COMPILES": "1"}  # fmt: skip
    log = checkpoints / f"{port}-{time.monotonic_ns()}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *map(str, command), "--port", f"{port}", *SIZES, *options],
            env=os.environ | settings, cwd=ROOT, stderr=file, stdout=file,
        )  # fmt: skip
    served = Served(process, port, log)

    def ready() -> bool:
        try:
            return served.raw("GET", "/health")[0] == 200
        except OSError:
            return False

    try:
        served.wait_until(ready)
        yield served
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def server(checkpoints):
    """The server that most tests share; it drafts in every step, whatever it costs."""
    with running_server(checkpoints, "--policy", "fixed") as served:
        yield served
        served.process.terminate()
        assert served.process.wait(PATIENCE) == 0 and "Traceback" not in served.log.read_text()


@pytest.fixture
def served(server):
    """The server, idle before and after, without a program compiled behind its start."""
    server.wait_until(lambda: server.raw("GET", "/health")[0] == 200)
    yield server
    server.wait_until(server.idle)
    assert server.metrics()["recompiles"] == 0 and not server.compiled_late()


@pytest.fixture(scope="session")
def client(server):
    with server.client() as client:
        yield client
