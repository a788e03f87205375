"""Verification-length policies: how many draft tokens of each row the target verifies.

A policy decides whether token k is verified from what is known before token k is drawn (its own confidence and those
before it); anything else would bend the output law (the non-anticipating property).
"""

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp


class Policy(Protocol):
    """Hashable, so that a compiled program belongs to it."""

    def lengths(self, confidence_logits: jax.Array) -> jax.Array:
        """Lengths [b] within 0..g from confidence logits [b, g]."""
        ...

    def widths(self, block_size: int) -> tuple[int, ...]:
        """Token counts a row (anchor included) to compile verification for, ascending; the last fits any length."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always verifies `length` drafts (None: the whole block)."""

    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 0:
            raise ValueError(f"length must be 0 or more, got {self.length}.")

    def lengths(self, confidence_logits: jax.Array) -> jax.Array:
        b, g = confidence_logits.shape
        return jnp.full((b,), g if self.length is None else min(self.length, g), jnp.int32)

    def widths(self, block_size: int) -> tuple[int, ...]:
        return (1 + (block_size if self.length is None else min(self.length, block_size)),)


@dataclass(frozen=True)
class Threshold:
    """Verifies the longest prefix whose survival (product of confidences) stays at or above `survival`."""

    survival: float = 0.4

    def __post_init__(self) -> None:
        if not 0 <= self.survival <= 1:
            raise ValueError(f"survival must be within [0, 1], got {self.survival}.")

    def lengths(self, confidence_logits: jax.Array) -> jax.Array:
        survival = jnp.cumprod(jax.nn.sigmoid(confidence_logits), axis=-1)
        return jnp.sum(jnp.cumprod((survival >= self.survival).astype(jnp.int32), axis=-1), axis=-1, dtype=jnp.int32)

    def widths(self, block_size: int) -> tuple[int, ...]:
        powers = [w for w in (1, 2, 4, 8, 16, 32) if w <= block_size]
        return (*powers, block_size + 1)
