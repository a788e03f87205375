"""What tests of commands share."""

import jax
import pytest


@pytest.fixture
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
