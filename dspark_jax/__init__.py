"""DSpark speculative decoding in JAX: a cheap drafter proposes blocks, the target verifies them, its law is kept.

Letters of axes and symbols, the same in all code:

| letter | meaning            | symbol    | meaning                                             |
|--------|--------------------|-----------|-----------------------------------------------------|
| b      | batch              | x_0       | anchor: the last committed token, drafted from      |
| t      | query positions    | U_k       | base logits of draft position k                     |
| s      | key positions      | B_k       | correction of the sequential head                   |
| d      | model width        | h_k       | backbone hidden state                               |
| n      | heads              | c_k       | confidence: x_k survives, given that its prefix did |
| k      | key/value heads    | a_{r,j}   | survival of request r's draft j, the product of c   |
| h      | head width         | l_r       | verify length: drafts of request r verified         |
| v      | vocabulary         | B         | tokens a verification, sum(1 + l_r)                 |
| g      | draft positions    | SPS(B)    | steps per second of a verification of B tokens      |
| p      | packed tokens      | tau       | tokens a round, the bonus included                  |
| r      | requests (or rank) | Theta     | throughput, tau * SPS(B)                            |
"""

from dspark_jax.checkpoints.drafter import load_drafter, save_drafter
from dspark_jax.checkpoints.target import LoadedTarget, load_target
from dspark_jax.decoding import (
    Batch,
    Generation,
    Generator,
    Request,
    Sampling,
    check_pair,
    speculative_generate,
)
from dspark_jax.decoding.generate import generate
from dspark_jax.drafters import MTP, Drafter, DrafterConfig, DSpark, Eagle3, Eagle3Config, MTPConfig, Proposal
from dspark_jax.models import Decoder, RopeConfig, TargetConfig
from dspark_jax.scheduling import (
    EarlyStop,
    Fixed,
    Gate,
    LaggedCapacity,
    Plain,
    Policy,
    StepCosts,
    Threshold,
    load_costs,
)

__all__ = [
    "MTP",
    "Batch",
    "DSpark",
    "Decoder",
    "Drafter",
    "DrafterConfig",
    "Eagle3",
    "Eagle3Config",
    "EarlyStop",
    "Fixed",
    "Gate",
    "Generation",
    "Generator",
    "LaggedCapacity",
    "LoadedTarget",
    "MTPConfig",
    "Plain",
    "Policy",
    "Proposal",
    "Request",
    "RopeConfig",
    "Sampling",
    "StepCosts",
    "TargetConfig",
    "Threshold",
    "check_pair",
    "generate",
    "load_costs",
    "load_drafter",
    "load_target",
    "save_drafter",
    "speculative_generate",
]
