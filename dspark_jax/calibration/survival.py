"""From confidence logits to survival: the one place where temperatures meet logits."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def to_survival(
    confidence_logits: jax.Array, temperatures: jax.Array | np.ndarray | Sequence[float] | None = None
) -> jax.Array:
    """a_k = prod_{i <= k} sigmoid(z_i / T_i): the probability that draft k survives verification. Runs inside a round.

    Args:
      confidence_logits: z [..., g]; +inf is certainty, -inf certain rejection.
      temperatures: T [g] or longer, positive and finite; None is 1 everywhere.

    Returns:
      [..., g] float32, never increasing along g.
    """
    logits = confidence_logits.astype(jnp.float32)
    if temperatures is not None:
        logits = logits / jnp.asarray(temperatures, jnp.float32)[: logits.shape[-1]]
    return jnp.cumprod(jax.nn.sigmoid(logits), axis=-1)


def to_survival_twin(
    confidence_logits: np.ndarray, temperatures: Sequence[float] | np.ndarray | None = None
) -> np.ndarray:
    """`to_survival` on the host, in float64: what the offline arithmetic uses."""
    logits = np.asarray(confidence_logits, np.float64)
    if temperatures is not None:
        logits = logits / np.asarray(temperatures, np.float64)[: logits.shape[-1]]
    return np.cumprod(sigmoid(logits), axis=-1)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) on the host, exact at infinity and without overflow."""
    return np.exp(-np.logaddexp(0, -x))
