"""Rotary position embedding in the half-split ("rotate half") convention of Hugging Face checkpoints."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.models.fields import section


@dataclass(frozen=True)
class RopeConfig:
    """How positions become rotations.

    Attributes:
      theta: base of the geometric frequency series.
      kind: `default`, `linear`, `llama3` or `yarn`.
      scaling: the parameters of `kind`, under their Hugging Face names.
    """

    theta: float = 10000.0
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = field(default=())

    REQUIRED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor", "original_max_position_embeddings"),
    }

    def __post_init__(self) -> None:
        if self.kind not in self.REQUIRED:
            raise ValueError(
                f"RoPE type {self.kind!r} is not supported; expected one of {sorted(self.REQUIRED)}. "
                "Use a checkpoint with one of these, or add the type to dspark_jax/models/rope.py."
            )
        p = dict(self.scaling)
        if missing := [name for name in self.REQUIRED[self.kind] if name not in p]:
            raise ValueError(f"RoPE type {self.kind!r} needs {missing} in its parameters, got {p}.")
        if not 1 < self.theta < math.inf:
            raise ValueError(f"RoPE's rope_theta is {self.theta:g}, expected a number above 1.")
        for name in p.keys() & {*self.REQUIRED[self.kind], "attention_factor", "beta_fast", "beta_slow"}:
            if not 0 < p[name] < math.inf:
                raise ValueError(f"RoPE's {name} is {p[name]:g}, expected a number above 0.")
        if self.kind == "llama3" and not p["low_freq_factor"] < p["high_freq_factor"]:
            raise ValueError(f"RoPE's high_freq_factor is {p['high_freq_factor']:g}, expected more than the low one.")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "RopeConfig":
        """Reads RoPE from wherever a Hugging Face config keeps it.

        `rope_theta` may stand at the top level, under `rope_parameters` or under `rope_scaling`; the type may be called
        `rope_type` or `type`. Raises ValueError for an unknown type, or when two places disagree.
        """
        outer = {k: config.get(k) for k in ("rope_theta", "partial_rotary_factor")}
        scaling: dict[str, Any] = {}
        for place in (outer, _renamed(config, "rope_scaling"), _renamed(config, "rope_parameters")):
            for name, value in place.items():
                if value is not None and scaling.setdefault(name, value) != value:
                    raise ValueError(
                        f"the config gives RoPE's {name} as {scaling[name]} and as {value}; expected one value."
                    )
        kind = scaling.pop("rope_type", "default")
        partial = scaling.pop("partial_rotary_factor", None)
        if partial not in (None, 1, 1.0):
            raise ValueError(
                f"partial_rotary_factor {partial} is not supported; expected 1.0 (the whole head rotates)."
            )
        if kind == "yarn" and "original_max_position_embeddings" not in scaling:
            scaling["original_max_position_embeddings"] = config.get("max_position_embeddings")
        if odd := {k: v for k, v in scaling.items() if not isinstance(v, int | float)}:
            raise ValueError(f"RoPE parameters {odd} are not supported; expected numbers.")
        theta = float(scaling.pop("rope_theta", 10000.0))
        return cls(theta=theta, kind=kind, scaling=tuple(sorted((k, float(v)) for k, v in scaling.items())))

    def to_hf(self) -> dict[str, Any]:
        """The `rope_parameters` entry of a Hugging Face config."""
        return {"rope_theta": self.theta, "rope_type": self.kind, **dict(self.scaling)}

    def frequencies(self, head_dim: int) -> tuple[np.ndarray, float]:
        """Inverse frequencies [head_dim / 2] in float32 and the factor that scales cos and sin."""
        inv = 1.0 / self.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        p = dict(self.scaling)
        if self.kind == "linear":
            return (inv / p["factor"]).astype(np.float32), 1.0
        if self.kind == "llama3":
            return _llama3(inv, p).astype(np.float32), 1.0
        if self.kind == "yarn":
            scaled, attention = _yarn(inv, p, head_dim, self.theta)
            return scaled.astype(np.float32), attention
        return inv.astype(np.float32), 1.0


def _renamed(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A `rope_scaling` or `rope_parameters` entry with its type under one name."""
    place = section(config, name)
    if nested := sorted(k for k, v in place.items() if isinstance(v, Mapping)):
        raise ValueError(f"RoPE parameters per layer type ({nested}) are not supported; expected one RoPE.")
    kinds = {str(kind) for kind in (place.pop("type", None), place.pop("rope_type", None)) if kind is not None}
    if len(kinds) > 1:
        raise ValueError(f"the config gives RoPE's type as {sorted(kinds)}; expected one value.")
    return {**place, "rope_type": kinds.pop()} if kinds else place


def _llama3(inv: np.ndarray, p: Mapping[str, float]) -> np.ndarray:
    wavelength = 2 * math.pi / inv
    low = p["original_max_position_embeddings"] / p["low_freq_factor"]
    high = p["original_max_position_embeddings"] / p["high_freq_factor"]
    smooth = (p["original_max_position_embeddings"] / wavelength - p["low_freq_factor"]) / (
        p["high_freq_factor"] - p["low_freq_factor"]
    )
    blended = (1 - smooth) * inv / p["factor"] + smooth * inv
    return np.where(wavelength > low, inv / p["factor"], np.where(wavelength < high, inv, blended))


def _yarn(inv: np.ndarray, p: Mapping[str, float], head_dim: int, theta: float) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones, warm the attention."""
    factor, original = p["factor"], p["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    def mscale(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    low, high = dimension(p.get("beta_fast", 32.0)), dimension(p.get("beta_slow", 1.0))
    if p.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    if "attention_factor" in p:
        attention = p["attention_factor"]
    elif p.get("mscale") and p.get("mscale_all_dim"):
        attention = mscale(factor, p["mscale"]) / mscale(factor, p["mscale_all_dim"])
    else:
        attention = mscale(factor)
    return inv / factor * ramp + inv * (1 - ramp), attention


def rotation(config: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [..., head_dim] in float32 for integer `positions` [...]."""
    inv, attention = config.frequencies(head_dim)
    angle = positions[..., None].astype(jnp.float32) * jnp.asarray(inv)
    angle = jnp.concatenate([angle, angle], axis=-1)
    return jnp.cos(angle) * attention, jnp.sin(angle) * attention


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [..., n, h] by cos, sin [..., h] (one rotation for all heads)."""
    first, second = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return (x * cos[..., None, :] + turned * sin[..., None, :]).astype(x.dtype)
