"""How many draft tokens to verify, and whether to draft at all."""

from dspark_jax.scheduling.costs import CostTable, Stairs, StepCosts, load_costs
from dspark_jax.scheduling.gate import Gate, while_it_pays
from dspark_jax.scheduling.policies import EarlyStop, Fixed, LaggedCapacity, Oracle, Outcome, Plain, Policy, Threshold
from dspark_jax.scheduling.pool import Pool, Round, pool

__all__ = [
    "CostTable",
    "EarlyStop",
    "Fixed",
    "Gate",
    "LaggedCapacity",
    "Oracle",
    "Outcome",
    "Plain",
    "Policy",
    "Pool",
    "Round",
    "Stairs",
    "StepCosts",
    "Threshold",
    "load_costs",
    "pool",
    "while_it_pays",
]
