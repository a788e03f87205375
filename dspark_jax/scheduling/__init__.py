"""How many draft tokens to verify, and what that costs."""

from dspark_jax.scheduling.costs import CostTable, Stairs, StepCosts, load_costs
from dspark_jax.scheduling.policies import Fixed, Policy, Threshold

__all__ = ["CostTable", "Fixed", "Policy", "Stairs", "StepCosts", "Threshold", "load_costs"]
