"""A server under load, by policy: throughput, what users wait, and how much is verified.

    python -m benchmarks.serve --data math=gsm8k.jsonl code=mbpp.jsonl
    python -m benchmarks.serve --data math=gsm8k.jsonl --urls vllm=http://localhost:8000/v1 --rates 0.5 1 2

The first starts `python -m serve` once a policy and repeat, by turns, and prints medians over the repeats; the second
measures a running server. Both read prompts of {"turns": [text, ...]} and write plots of the paper's Figures 7 and 8.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import platform
import re
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.load import Load, Summary, closed_loop, open_loop
from benchmarks.serve_plots import plot_budget, plot_pareto
from dspark_jax.evaluation import read_prompts

console = Console(width=170)


@dataclasses.dataclass(frozen=True)
class Serving:
    """Measure servers.

    Attributes:
      data: DOMAIN=FILE pairs of {"turns": [text, ...]} JSONL; requests take the domains by turns.
      server_command: starts a server; {python}, {policy} and {port} are filled in.
      policies: started one after the other.
      urls: NAME=URL of servers that run already, measured in place of the policies.
      transformers: also run this model (as `--target`) with transformers on torch, in batches of 8 prompts; python:
        which has torch and transformers.
      model: name to ask for; the first of /v1/models if absent.
      users: closed loop, so many users at a time; rates: open loop, so many requests a second.
      requests: at least so many a point; each: and so many a user.
      max_tokens: new tokens a request; temperature: of them.
      repeats: of everything, interleaved.
      start_seconds: a server may take to start.
      out: directory of plots and the servers' logs; json: file of everything measured.
    """

    data: tuple[str, ...]
    server_command: str = "{python} -m serve --policy {policy} --port {port}"
    policies: tuple[str, ...] = ("none", "fixed", "threshold", "scheduled")
    urls: tuple[str, ...] = ()
    transformers: str | None = None
    python: str = sys.executable
    model: str | None = None
    users: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    rates: tuple[float, ...] = ()
    requests: int = 12
    each: int = 3
    max_tokens: int = 64
    temperature: float = 0.0
    repeats: int = 3
    start_seconds: float = 900.0
    out: str = "runs/serve"
    json: str | None = None


Key = tuple[str, str, float]
"""Mode, "users" or "rate", and its value."""


def main(options: Serving) -> None:
    """Measures everything, prints tables, writes plots."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    prompts, modes = read_domains(options.data), dict(pair.split("=", 1) for pair in options.urls)
    loads: dict[Key, list[Load]] = defaultdict(list)
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
    peer: list[float] = []
    for _ in range(options.repeats):
        for mode in modes or options.policies:
            with contextlib.ExitStack() as stack:
                url = modes[mode] if modes else stack.enter_context(server(options, mode, out / f"{mode}.log"))
                for kind, value, load in asyncio.run(measure(url, prompts, options, numbers[mode])):
                    loads[mode, kind, value].append(load)
        if options.transformers:
            peer.append(run_transformers(options, prompts))
    if options.json:
        rows = [
            {"mode": m, k: v, "repeats": [*map(dataclasses.asdict, repeats)]} for (m, k, v), repeats in loads.items()
        ]
        Path(options.json).write_text(json.dumps({"machine": machine(), "loads": rows, "transformers": peer}))
    summaries = {key: [Summary.of(load) for load in repeats] for key, repeats in loads.items()}
    console.print(f"{machine()}; {options.max_tokens} new tokens, temperature {options.temperature}, {options.data}")
    console.print(table(summaries, peer, options.repeats))
    curves: dict[str, dict[int, Summary]] = defaultdict(dict)
    for (mode, kind, value), repeats in summaries.items():
        if kind == "users":
            curves[mode][int(value)] = Summary.median(repeats)
    if curves:
        plot_pareto(out / "pareto.png", curves)
        plot_budget(out / "budget.png", curves)


def read_domains(pairs: tuple[str, ...]) -> list[str]:
    """Prompts in random order, the domains by turns, each as many as the smallest has."""
    columns = []
    for pair in pairs:
        texts = read_prompts(pair.partition("=")[2] or pair)
        columns.append([texts[i] for i in np.random.default_rng(0).permutation(len(texts))])
    return [text for row in zip(*columns, strict=False) for text in row]


async def measure(
    url: str, prompts: list[str], options: Serving, numbers: Iterator[int]
) -> list[tuple[str, float, Load]]:
    """One load for every point, after a warm-up.

    Args:
      numbers: of requests that the server was not asked yet: a prompt that came before might be found cached.
    """
    results = []
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits, headers=key()) as client:
        model = options.model or (await client.get("models")).raise_for_status().json()["data"][0]["id"]

        def bodies(count: int) -> list[dict[str, Any]]:
            return [request(model, prompts[i % len(prompts)], options, i) for i in itertools.islice(numbers, count)]

        await closed_loop(client, bodies(8), 4)
        for users in options.users:
            count = max(options.requests, options.each * users)
            results.append(("users", users, await closed_loop(client, bodies(count), users)))
        for rate in options.rates:
            results.append(("rate", rate, await open_loop(client, bodies(options.requests), rate, seed=0)))
        told = await client.get(httpx2.URL(url).join("/metrics"))
        if (count := re.search(r"^dspark_recompiles (\S+)", told.text, re.M)) and float(count[1]):
            console.print(f"{url} compiled {count[1]} programs under load", style="red")
    for kind, value, load in results:
        if errors := {answer.error for answer in load.answers if answer.error}:
            console.print(f"{url}, {value} {kind}: {sorted(errors)[:3]}", style="red", markup=False)
    return results


def request(model: str, text: str, options: Serving, seed: int) -> dict[str, Any]:
    """A streamed chat completion."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def key() -> dict[str, str]:
    """The header of $OPENAI_API_KEY."""
    return {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"} if "OPENAI_API_KEY" in os.environ else {}


@contextlib.contextmanager
def server(options: Serving, policy: str, log: Path) -> Iterator[str]:
    """Runs a server and gives its base URL once it answers.

    Raises:
      RuntimeError: it ended, or took too long.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = options.server_command.format(python=sys.executable, policy=policy, port=port)
    url, late = f"http://127.0.0.1:{port}/v1", time.monotonic() + options.start_seconds
    with open(log, "wb") as file:
        process = subprocess.Popen(shlex.split(command), stdout=file, stderr=subprocess.STDOUT)
    try:
        while not answers(url):
            if process.poll() is not None or time.monotonic() > late:
                raise RuntimeError(f"{command} does not answer: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    """Whether a server is there and ready."""
    try:
        return httpx2.get(f"{url}/models", headers=key(), timeout=10).is_success
    except httpx2.TransportError:
        return False


def run_transformers(options: Serving, prompts: list[str]) -> float:
    """Tokens/s of transformers on torch, in a process of its own."""
    asked = {"model": options.transformers, "prompts": prompts[:24], "max_tokens": options.max_tokens}
    command = [options.python, "-m", "benchmarks.transformers_batches"]
    done = subprocess.run(command, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(summaries: dict[Key, list[Summary]], peer: list[float], repeats: int) -> Table:
    """Medians; ratios of throughput are taken within a repeat."""
    result = Table(title=f"medians over {repeats} repeats; seconds; ratios of throughput")
    columns = (
        "load",
        "mode",
        "tok/s",
        "tok/s a user",
        "TTFT p50",
        "p95",
        "gap p50",
        "p95",
        "max",
        "accepted",
        "budget",
    )
    for column in (*columns, "errors", "/ none", "/ best other"):
        result.add_column(column, justify="right")
    for kind, value in dict.fromkeys(key[1:] for key in summaries):
        rates = {m: [s.throughput for s in found] for (m, *at), found in summaries.items() if at == [kind, value]}
        for mode in rates:
            found = Summary.median(summaries[mode, kind, value])
            others = [rates[m] for m in rates if m != mode]
            best = [max(side) for side in zip(*others, strict=True)]
            numbers = [f"{found.throughput:.1f}", f"{found.user_speed:.1f}", f"{found.ttft_p50:.3f}"]
            numbers += [f"{x:.3f}" for x in (found.ttft_p95, found.gap_p50, found.gap_p95, found.gap_max)]
            numbers += [f"{found.accept_length:.2f}", f"{found.budget:.2f}", f"{found.errors:.0f}"]
            ratios = [ratio(rates[mode], rates.get("none")), ratio(rates[mode], best)]
            result.add_row(f"{value:g} {kind}", mode, *numbers, *ratios)
        if peer and (kind, value) == ("users", 8):
            best = [max(side) for side in zip(*rates.values(), strict=True)]
            numbers = [f"{statistics.median(peer):.1f}", *[""] * 9]
            result.add_row("8 users", "transformers", *numbers, ratio(peer, rates.get("none")), ratio(peer, best))
        result.add_section()
    return result


def ratio(rates: list[float], others: list[float] | None) -> str:
    """The median of ratios, as text."""
    return f"{statistics.median(a / b for a, b in zip(rates, others, strict=True)):.2f}" if others else "-"


def machine() -> str:
    """What this ran on; servers of other code have versions of their own."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "flax"))
    return f"{platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}, {versions}"


if __name__ == "__main__":
    main(tyro.cli(Serving))
