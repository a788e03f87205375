"""From confidence logits to survival: the one place where a scaling meets logits."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What makes confidence logits z_k probabilities: sigmoid(z_k / T_k + b_k) at draft position k.

    Attributes:
      temperatures: T [g], positive and finite.
      shifts: b [g], finite; empty is 0 everywhere, the paper's Sequential Temperature Scaling. With shifts it is
        Platt's scaling, which also reaches confidences that are too high, or too low, all over.

    Raises:
      ValueError: no temperature, one that is no positive finite number, or shifts of another number or not finite.
    """

    temperatures: tuple[float, ...]
    shifts: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise ValueError("a scaling needs at least one temperature, got none.")
        if not all(math.isfinite(t) and t > 0 for t in self.temperatures):
            raise ValueError(f"temperatures must be positive and finite, got {list(self.temperatures)}.")
        if self.shifts and len(self.shifts) != len(self.temperatures):
            raise ValueError(f"expected {len(self.temperatures)} shifts, one a temperature, got {len(self.shifts)}.")
        if not all(map(math.isfinite, self.shifts)):
            raise ValueError(f"shifts must be finite, got {list(self.shifts)}.")

    def first(self, block_size: int) -> "Scaling":
        """Of the first `block_size` positions: fits go left to right, so any prefix stands alone.

        Raises:
          ValueError: it has fewer positions.
        """
        if len(self.temperatures) < block_size:
            raise ValueError(
                f"{len(self.temperatures)} temperatures for {block_size} draft positions; calibrate records of blocks "
                f"of {block_size}, or use blocks of {len(self.temperatures)} (--block-size)."
            )
        return Scaling(self.temperatures[:block_size], self.shifts[:block_size])

    def __call__(self, logits):
        """z / T + b for z [..., g], of NumPy or of JAX, g at most what this holds."""
        g = logits.shape[-1]
        scaled = logits / np.asarray(self.temperatures[:g], logits.dtype)
        return scaled + np.asarray(self.shifts[:g], logits.dtype) if self.shifts else scaled


def to_survival(confidence_logits: jax.Array, scaling: Scaling | None = None) -> jax.Array:
    """a_k = prod_{i <= k} sigmoid(z_i / T_i + b_i): the probability that draft k survives. Runs inside a round.

    Args:
      confidence_logits: z [..., g]; +inf is certainty, -inf certain rejection.
      scaling: None takes the logits as they are.

    Returns:
      [..., g] float32, never increasing along g.
    """
    logits = confidence_logits.astype(jnp.float32)
    return jnp.cumprod(jax.nn.sigmoid(logits if scaling is None else scaling(logits)), axis=-1)


def to_survival_twin(confidence_logits: np.ndarray, scaling: Scaling | None = None) -> np.ndarray:
    """`to_survival` on the host, in float64: what the offline arithmetic uses."""
    logits = np.asarray(confidence_logits, np.float64)
    return np.cumprod(sigmoid(logits if scaling is None else scaling(logits)), axis=-1)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) on the host, exact at infinity and without overflow."""
    return np.exp(-np.logaddexp(0, -x))
