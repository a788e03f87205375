"""How many draft tokens to verify."""

from dspark_jax.scheduling.policies import Fixed, Policy, Threshold

__all__ = ["Fixed", "Policy", "Threshold"]
