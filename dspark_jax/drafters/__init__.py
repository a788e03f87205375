"""Drafters: models that propose blocks of tokens for the target to verify."""

from dspark_jax.drafters.autoregressive_config import Eagle3Config, MTPConfig
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.drafters.eagle3 import Eagle3
from dspark_jax.drafters.mtp import MTP
from dspark_jax.drafters.protocol import Drafter, Proposal

__all__ = [
    "MTP",
    "DSpark",
    "Drafter",
    "DrafterConfig",
    "Eagle3",
    "Eagle3Config",
    "MTPConfig",
    "Proposal",
]
