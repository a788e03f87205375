"""Decoding: sampling, verification and generation.

The function `generate` is exported by `dspark_jax`; here its name belongs to the module it lives in.
"""

from dspark_jax.decoding.generate import (
    Batch,
    Generation,
    Generator,
    Request,
    check_pair,
    speculative_generate,
)
from dspark_jax.decoding.sampling import Sampling

__all__ = [
    "Batch",
    "Generation",
    "Generator",
    "Request",
    "Sampling",
    "check_pair",
    "speculative_generate",
]
