"""Drafters: models that propose blocks of tokens for the target to verify."""

from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.drafters.protocol import Drafter, Proposal

__all__ = ["DSpark", "Drafter", "DrafterConfig", "Proposal"]
