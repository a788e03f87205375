"""A server at saturation for long: mixed requests, some left half-way; does its memory stay flat, does anything fail?

    python -m serve ... --name tiny &
    python -m benchmarks.soak --pid $! --model tiny --minutes 30

Prints a line every half minute: resident memory of the server, requests by outcome. Ends with exit code 1 if a request
failed, a greedy answer was not what it had been before, or something is left behind. Needs Linux and `openai`.
"""

import asyncio
import collections
import contextlib
import dataclasses
import random
import re
import string
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
import tyro

OUTCOMES = ("ok", "left", "refused", "busy", "wrong", "failed")


@dataclasses.dataclass
class Soak:
    """Load of mixed requests.

    Attributes:
      pid: of the server, on this machine; model: its name.
      clients: that ask one request after the other; every one of them leaves some half-way.
      longest: characters of a prompt and tokens of an answer, at most.
    """

    pid: int
    model: str
    url: str = "http://127.0.0.1:8000"
    minutes: float = 30.0
    clients: int = 16
    longest: int = 60
    seed: int = 0

    def __post_init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.known: dict[str, str] = {}
        self.memory: list[int] = []

    async def run(self) -> bool:
        """Whether all was well."""
        end = time.monotonic() + 60 * self.minutes
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600) as client:
            asking = [asyncio.create_task(self._ask_until(end, client, i)) for i in range(self.clients)]
            while time.monotonic() < end:
                self._tell()
                await asyncio.sleep(min(30.0, max(end - time.monotonic(), 0.0)))
            await asyncio.gather(*asking)
        await asyncio.sleep(1)
        left = {
            name: self._gauge(name) for name in ("running_requests", "waiting_requests", "pages_used", "recompiles")
        }
        self._tell()
        middle = self.memory[len(self.memory) // 2]
        print(f"memory: {self.memory[0]} MiB at the start, {middle} half-way, {self.memory[-1]} at the end; {left}")
        return not (self.counts["wrong"] or self.counts["failed"] or any(left.values()))

    async def _ask_until(self, end: float, client: openai.AsyncOpenAI, number: int) -> None:
        draw = random.Random(f"{self.seed}-{number}")
        while time.monotonic() < end:
            try:
                outcome = await self._ask(client, draw)
            except openai.RateLimitError:
                outcome = "busy"
            except openai.BadRequestError:
                outcome = "refused"
            except openai.APIError as error:
                print(f"{type(error).__name__}: {error}", flush=True)
                outcome = "failed"
            self.counts[outcome] += 1

    async def _ask(self, client: openai.AsyncOpenAI, draw: random.Random) -> str:
        prompt = "".join(draw.choices(string.ascii_lowercase + " ", k=draw.randint(1, self.longest)))
        options: dict[str, Any] = {"model": self.model, "max_tokens": draw.randint(1, self.longest)}
        match draw.randrange(7):
            case 0:
                return await self._repeat(client, draw.choice(string.ascii_lowercase))
            case 1:
                options |= {"stop": draw.choices(string.ascii_lowercase, k=2), "n": draw.randint(1, 3)}
            case 2:
                options |= {"logprobs": draw.randint(0, 20), "frequency_penalty": 1.0, "top_p": 0.9}
            case 3:
                options |= {"temperature": 0, "extra_body": {"speculative": False, "min_tokens": 1}}
            case 4:
                options |= {"logprobs": 21}
            case 5:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(draw.uniform(0, 0.2)):
                        await client.completions.create(prompt=prompt, **options)
                        return "ok"
                return "left"
        if draw.random() < 0.5:
            await client.completions.create(prompt=prompt, **options)
            return "ok"
        most = draw.choice([1, 3, self.longest * 4])
        async with await client.completions.create(prompt=prompt, stream=True, **options) as chunks:
            async for number, _ in _numbered(chunks):
                if number == most:
                    return "left"
        return "ok"

    async def _repeat(self, client: openai.AsyncOpenAI, prompt: str) -> str:
        """A greedy request that was asked before has the answer that it had."""
        answer = await client.completions.create(
            model=self.model, prompt=prompt, max_tokens=self.longest, temperature=0
        )
        return "ok" if self.known.setdefault(prompt, answer.choices[0].text) == answer.choices[0].text else "wrong"

    def _tell(self) -> None:
        status = Path(f"/proc/{self.pid}/status").read_text()
        self.memory.append(int(re.findall(r"VmRSS:\s*(\d+) kB", status)[0]) >> 10)
        said = ", ".join(f"{self.counts[outcome]} {outcome}" for outcome in OUTCOMES)
        print(f"{time.strftime('%H:%M:%S')}  {self.memory[-1]} MiB  {said}", flush=True)

    def _gauge(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics") as reply:
            return float(re.findall(rf"^dspark_{name} (\S+)$", reply.read().decode(), re.MULTILINE)[0])


async def _numbered(chunks):
    number = 0
    async for chunk in chunks:
        number += 1
        yield number, chunk


if __name__ == "__main__":
    sys.exit(not asyncio.run(tyro.cli(Soak).run()))
