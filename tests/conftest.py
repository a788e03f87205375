"""What all tests share: a CPU, the golden cases and a tiny target."""

import dataclasses
import os
import tempfile
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX_PLATFORMS=cuda for `pytest -m gpu`

import hypothesis
import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.checkpoints.target import load_target
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.models.config import TargetConfig
from dspark_jax.models.decoder import Decoder

GOLDENS = Path(__file__).parent / "goldens"

hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("tests")

# Compiled programs are kept between runs, outside the repository and unreadable to others.
PROGRAMS = Path(tempfile.gettempdir()) / f"dspark-jax-test-programs-{os.getuid()}"
PROGRAMS.mkdir(mode=0o700, exist_ok=True)
if PROGRAMS.stat().st_uid == os.getuid():
    jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def pytest_configure(config: pytest.Config) -> None:
    # Programs of the default tests run for milliseconds: most of XLA's passes would cost more than all that they save.
    jax.config.update("jax_disable_most_optimizations", "not slow" in config.option.markexpr)


@dataclasses.dataclass(frozen=True)
class Golden:
    """A case computed by the PyTorch reference; models are loaded when first used, and shared, so never change them.

    Attributes:
      directory: holds target/, draft/ and expected.safetensors, see goldens/README.md.
    """

    directory: Path

    @cached_property
    def expected(self) -> dict[str, np.ndarray]:
        return load_file(self.directory / "expected.safetensors")

    @cached_property
    def target(self) -> Decoder:
        return load_target(self.directory / "target", dtype=np.float32).model

    @cached_property
    def drafter(self) -> DSpark:
        return load_drafter(self.directory / "draft", target=self.target)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    """golden("qwen3_dspark_rnn").target, .drafter and .expected (smollm2 has only the last)."""
    return lru_cache(lambda name: Golden(GOLDENS / name))


@pytest.fixture(scope="session")
def tiny_target() -> Decoder:
    """A random float32 target of 2 layers; 37 of its 40 rows are tokens, so a mask token can be 37, 38 or 39."""
    config = TargetConfig(
        model_type="llama",
        vocab_size=40,
        num_tokens=37,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    )
    return Decoder(config, rngs=nnx.Rngs(0))
