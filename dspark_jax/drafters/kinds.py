"""Every kind of drafter: the architecture a checkpoint names, its config, its module."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from dspark_jax.drafters.autoregressive_config import Eagle3Config, MTPConfig
from dspark_jax.drafters.config import ARCHITECTURE, DrafterConfig
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.drafters.eagle3 import Eagle3
from dspark_jax.drafters.mtp import MTP

AnyDrafter = DSpark | Eagle3 | MTP
AnyDrafterConfig = DrafterConfig | Eagle3Config | MTPConfig

CONFIGS: dict[str, type[AnyDrafterConfig]] = {
    ARCHITECTURE: DrafterConfig,
    Eagle3Config.ARCHITECTURE: Eagle3Config,
    MTPConfig.ARCHITECTURE: MTPConfig,
}


def build_drafter(config: AnyDrafterConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> AnyDrafter:
    """A drafter of the kind and shape that a config describes, with random parameters."""
    if isinstance(config, DrafterConfig):
        return DSpark(config, dtype=dtype, rngs=rngs)
    if isinstance(config, Eagle3Config):
        return Eagle3(config, dtype=dtype, rngs=rngs)
    return MTP(config, dtype=dtype, rngs=rngs)
