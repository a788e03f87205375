"""A small engine, and what its requests give one by one."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from flax import nnx

from dspark_jax import Decoder, DrafterConfig, DSpark, Generation, Generator, Request
from dspark_jax.scheduling import Fixed, Policy
from serve.engine.config import EngineConfig
from serve.engine.engine import ServeEngine
from serve.engine.request import Output, ServeRequest

G = 3
CONFIG = EngineConfig(slots=3, max_waiting=30, max_length=96, page_size=8, pages=28, chunk=16, rows=(12,))
COMMON = [field.name for field in dataclasses.fields(Request)]


@pytest.fixture(scope="package")
def stopping_target(tiny_target) -> Decoder:
    """The tiny target with a stop id, so that some answers end early."""
    graph, state = nnx.split(tiny_target)
    target = nnx.merge(graph, state)
    target.config = dataclasses.replace(target.config, stop_ids=(3,), max_positions=96)
    return target


@pytest.fixture(scope="package")
def drafter(tiny_target) -> DSpark:
    """A random drafter with every part."""
    c = tiny_target.config
    config = DrafterConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=32, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=8, block_size=G, tap_ids=(-1, 0), num_target_layers=2, mask_token_id=39,
        markov_rank=4, confidence_head=True, confidence_with_markov=True, draft_vocab_size=30,
    )  # fmt: skip
    return DSpark(config, rngs=nnx.Rngs(1))


@pytest.fixture(scope="package")
def engine(stopping_target, drafter):
    """An engine that runs; `use` a policy while it is idle."""
    engine = ServeEngine(stopping_target, drafter, CONFIG)
    engine.warm_up(repeats=1)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="package")
def solo(stopping_target, drafter) -> Callable[..., list[Generation]]:
    """solo(requests, policy): each on its own, drafted for unless the policy is None."""
    generators = {}

    def run(requests: Sequence[ServeRequest], policy: Policy | None = None) -> list[Generation]:
        if policy not in generators:
            generators[policy] = Generator(stopping_target, policy and drafter, policy=policy, max_length=96)
        plain = [Request(**{name: getattr(r, name) for name in COMMON}) for r in requests]
        return [generators[policy].generate([request])[0] for request in plain]

    return run


def collect(engine: ServeEngine, requests: Sequence[ServeRequest], policy: Policy = Fixed()) -> list[list[Output]]:  # noqa: B008
    """All outputs of requests that come one after the other while the engine runs."""
    engine.use(policy)

    async def one(i: int, request: ServeRequest) -> list[Output]:
        await asyncio.sleep(0.002 * i)
        return [output async for output in engine.submit(request)]

    async def together() -> list[list[Output]]:
        return await asyncio.gather(*(one(i, request) for i, request in enumerate(requests)))

    return asyncio.run(together())


def tokens_of(outputs: Sequence[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def mixed(count: int, seed: int = 0, **options) -> list[ServeRequest]:
    """Requests of all lengths."""
    draw = np.random.default_rng(seed)
    sizes = zip(draw.integers(1, 50, count), draw.integers(1, 46, count), strict=True)
    return [
        ServeRequest(draw.integers(0, 37, n).tolist(), max_tokens=int(m), seed=i, **options)
        for i, (n, m) in enumerate(sizes)
    ]
