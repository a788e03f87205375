"""Targets: the frozen models whose output law is kept."""

from dspark_jax.models.cache import Cache, DenseCache
from dspark_jax.models.config import TargetConfig
from dspark_jax.models.decoder import Decoder, check_taps
from dspark_jax.models.rope import RopeConfig

__all__ = ["Cache", "Decoder", "DenseCache", "RopeConfig", "TargetConfig", "check_taps"]
