"""Drafters, batches and runs of a size that trains in seconds."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.tiny import run as tiny
from configs.tiny import write_target
from dspark_jax.checkpoints.target import LoadedTarget, load_target
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.models.decoder import Decoder
from train.config import RunConfig


@pytest.fixture(scope="session")
def make_drafter() -> Callable[..., DSpark]:
    """make_drafter(target, **fields): a drafter, random to the last parameter, whose config has these fields."""

    def make(target: Decoder, **fields) -> DSpark:
        c = target.config
        shape = {name: getattr(c, name) for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim")}
        defaults = dict(
            vocab_size=c.vocab_size,
            intermediate_size=24,
            num_layers=2,
            block_size=4,
            tap_ids=(-1, 0),
            num_target_layers=c.num_layers,
            mask_token_id=c.vocab_size - 1,
            markov_rank=6,
            confidence_head=True,
            confidence_with_markov=True,
        )
        config = DrafterConfig(**shape, **{**defaults, **fields})
        graph, state = nnx.split(nnx.eval_shape(lambda: DSpark(config, rngs=nnx.Rngs(0))))
        numbers = np.random.default_rng(7)

        def draw(variable):
            if not isinstance(variable, nnx.Param):
                return jnp.arange(variable.size, dtype=jnp.int32) + 3
            size, mean = (variable.shape[-1] ** -0.5, 0) if variable.ndim > 1 else (0.1, 1)
            return jnp.asarray(mean + size * numbers.normal(size=variable.shape), jnp.float32)

        flat = [(path, variable.replace(draw(variable))) for path, variable in nnx.to_flat_state(state)]
        return nnx.merge(graph, nnx.from_flat_state(flat))

    return make


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory) -> Path:
    """The target of configs/tiny.py on disk."""
    directory = tmp_path_factory.mktemp("target")
    write_target(directory)
    return directory


@pytest.fixture(scope="session")
def disk_target(tiny_directory) -> LoadedTarget:
    """The target of configs/tiny.py, loaded."""
    return load_target(tiny_directory)


def write_answers(path: Path) -> None:
    """Twelve documents of random tokens."""
    draw = np.random.default_rng(3)
    rows = [
        {
            "prompt": draw.integers(3, 40, 6).tolist(),
            "answer": draw.integers(3, 40, int(draw.integers(20, 60))).tolist(),
        }
        for _ in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def tiny_run(tmp_path, tiny_directory) -> RunConfig:
    """The run of configs/tiny.py on twelve documents of random tokens."""
    data = tmp_path / "answers.jsonl"
    write_answers(data)
    return dataclasses.replace(
        tiny, out=str(tmp_path / "run"), data=(str(data),), target=str(tiny_directory), checkpoint_every=10
    )
