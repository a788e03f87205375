"""Targets and drafters whose tokens and acceptance are known."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax import (
    MTP,
    Decoder,
    DrafterConfig,
    DSpark,
    Eagle3,
    Eagle3Config,
    Generation,
    Generator,
    MTPConfig,
    Request,
    TargetConfig,
)
from dspark_jax.drafters.kinds import build_drafter

TOKENS, ROWS = 37, 40


def config_for(target: Decoder, **changes) -> DrafterConfig:
    c = target.config
    return DrafterConfig(
        **{
            "vocab_size": c.vocab_size,
            "hidden_size": c.hidden_size,
            "intermediate_size": 32,
            "num_layers": 1,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 8,
            "block_size": 7,
            "tap_ids": (-1,),
            "num_target_layers": c.num_layers,
            "mask_token_id": c.vocab_size - 1,
            **changes,
        }
    )


def autoregressive_config(target: Decoder, kind: str) -> Eagle3Config | MTPConfig:
    """Of an Eagle3 ("eagle3") or MTP ("mtp") drafter of 7 tokens."""
    shape = dataclasses.asdict(config_for(target))
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "block_size")
    shape = {name: shape[name] for name in (*names, "num_target_layers")}
    return MTPConfig(**shape) if kind == "mtp" else Eagle3Config(**shape, tap_ids=(-1, 0))


class Scripted:
    """Row i drafts `script[i]` by position, the first `right[i]` tokens of a block as they stand, the rest wrong.

    Everything else, caches and logits included, is that of the random drafter it is mixed into.
    """

    def __init__(self, config, script: np.ndarray, right: np.ndarray):
        super().__init__(config, rngs=nnx.Rngs(3))
        self.script, self.right = nnx.Variable(jnp.asarray(script)), nnx.Variable(jnp.asarray(right))

    def propose(self, target, head, cache, anchor, position, sampling, keys, block_size=None):
        proposal, cache = super().propose(target, head, cache, anchor, position, sampling, keys, block_size)
        slots = jnp.arange(proposal.tokens.shape[1])
        tokens = jnp.take_along_axis(self.script[...], position[:, None] + 1 + slots, axis=1, mode="clip")
        tokens = jnp.where(slots < self.right[...][:, None], tokens, (tokens + 1) % target.config.num_tokens)
        probs = jax.nn.one_hot(tokens, target.config.vocab_size)
        return dataclasses.replace(proposal, tokens=tokens, probs=probs), cache


class ScriptedDSpark(Scripted, DSpark): ...


class ScriptedEagle3(Scripted, Eagle3): ...


class ScriptedMTP(Scripted, MTP): ...


@pytest.fixture(scope="session")
def scripted(tiny_target) -> Callable[[str, np.ndarray, np.ndarray], Scripted]:
    """scripted(kind, script [b, s], right [b]): a `Scripted` drafter of 7 tokens for the tiny target."""

    def make(kind: str, script: np.ndarray, right: np.ndarray) -> Scripted:
        if kind == "dspark":
            return ScriptedDSpark(config_for(tiny_target, tap_ids=(-1, 0), markov_rank=4), script, right)
        made = ScriptedMTP if kind == "mtp" else ScriptedEagle3
        return made(autoregressive_config(tiny_target, kind), script, right)

    return make


@pytest.fixture(scope="session")
def tiny_drafter(tiny_target) -> DSpark:
    """A random drafter of 7 tokens with a vanilla head whose drafts the tiny target sometimes accepts."""
    config = config_for(tiny_target, tap_ids=(-1, 0), markov_rank=8, confidence_head=True, confidence_with_markov=True)
    drafter = DSpark(config, rngs=nnx.Rngs(1))
    drafter.markov.w2[...] = 0.3 * jax.random.normal(jax.random.key(2), drafter.markov.w2.shape)
    return drafter


@pytest.fixture(scope="session")
def tiny_autoregressive(tiny_target) -> Callable[[str], Eagle3 | MTP]:
    """tiny_autoregressive(kind): a random "eagle3" or "mtp" drafter of 7 tokens for the tiny target."""
    return lambda kind: build_drafter(autoregressive_config(tiny_target, kind), rngs=nnx.Rngs(1))


@pytest.fixture(scope="session")
def tiny(tiny_target, tiny_drafter) -> Generator:
    return Generator(tiny_target, tiny_drafter)


@pytest.fixture(scope="session")
def tiny_plain(tiny_target) -> Generator:
    return Generator(tiny_target)


@pytest.fixture(scope="session")
def together() -> Callable:
    """together(generator, requests): their results as one batch, padded to one size so that tests share programs."""

    def run(generator: Generator, requests: list[Request]) -> list[Generation]:
        return generator.generate([*requests, *[Request([0], 1)] * (50 - len(requests))])[: len(requests)]

    return run


@pytest.fixture(scope="session")
def counting_target() -> Decoder:
    """Counts up: after x comes x + 1, after 36 comes 0. Its own stop ids are 30 and 33."""
    config = TargetConfig("llama", ROWS, ROWS, 8, 1, 1, 1, 8, num_tokens=TOKENS, stop_ids=(30, 33))
    target = Decoder(config, rngs=nnx.Rngs(0))
    target.layers[0].attention.out.weight[...] *= 0
    target.layers[0].mlp.down.weight[...] *= 0
    target.embedding[...] = jnp.eye(ROWS)
    target.head.weight[...] = jnp.eye(ROWS)[(jnp.arange(ROWS) - 1) % TOKENS]
    return target


@pytest.fixture(scope="session")
def counter(counting_target) -> Callable[..., Generator]:
    """counter(): a generator with a perfect drafter; counter(wrong=(5,)): one that drafts wrongly after 5."""

    def make(wrong=(), **options) -> Generator:
        config = config_for(counting_target, markov_rank=ROWS, hidden_size=ROWS)
        drafter = DSpark(config, rngs=nnx.Rngs(0))
        drafter.norm.scale[...] *= 0
        drafter.markov.w1[...] = jnp.eye(ROWS)
        shift = np.eye(ROWS, dtype=np.float32)[(np.arange(ROWS) - 1) % TOKENS]
        shift[:, list(wrong)] = np.eye(ROWS, dtype=np.float32)[:, list(wrong)]
        drafter.markov.w2[...] = 30 * shift
        return Generator(counting_target, drafter, **options)

    return make
