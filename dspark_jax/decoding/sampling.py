"""From logits to the distribution that is sampled, the same for draft and target."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

GREEDY_BELOW = 1e-5
"""Temperatures under this are 0: the argmax point mass."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Per-row sampling parameters; arrays, so changing them never recompiles.

    Attributes:
      temperature: [b]; 0 is greedy.
      top_k: [b]; at most this many tokens (all that tie with the last one are kept); 0 or -1 is off.
      top_p: [b]; the smallest set of most likely tokens with at least this mass; 1 is off, 0 keeps the most likely.
      min_p: [b]; tokens at least this likely relative to the most likely; 0 is off.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array

    @classmethod
    def create(
        cls,
        batch: int,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        min_p: float | Sequence[float] = 0.0,
    ) -> "Sampling":
        """Validates and broadcasts one value or one value a row.

        Raises:
          ValueError: a value out of range, or a sequence whose length is not `batch`.
        """
        return cls(
            _row(batch, "temperature", temperature, np.float32, 0, 1e30),
            _row(batch, "top_k", top_k, np.int32, -1, np.iinfo(np.int32).max),
            _row(batch, "top_p", top_p, np.float32, 0, 1),
            _row(batch, "min_p", min_p, np.float32, 0, 1),
        )

    @property
    def greedy(self) -> jax.Array:
        """[b] booleans: rows that take the argmax."""
        return self.temperature < GREEDY_BELOW


def _row(batch: int, name: str, value, dtype, low: float, high: float) -> jax.Array:
    array = np.asarray(value, np.float64)
    if array.ndim and array.shape != (batch,):
        raise ValueError(f"{name} needs one value or one a row ({batch}), got shape {array.shape}.")
    if not (np.isfinite(array) & (array >= low) & (array <= high)).all():
        raise ValueError(f"{name} must be within [{low:g}, {high:g}], got {value!r}.")
    if dtype is np.int32 and (array % 1).any():
        raise ValueError(f"{name} must be a whole number, got {value!r}.")
    return jnp.asarray(np.broadcast_to(array.astype(dtype), (batch,)))


def distribution(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """The distribution that a row is sampled from.

    Filters apply in the order temperature, top-k, top-p, min-p, each on what the one before left.

    Args:
      logits: [b, ..., v] float32; -inf is allowed for rows of padding.

    Returns:
      Probabilities [b, ..., v]; one-hot for greedy rows.
    """
    lead = (slice(None), *(None,) * (logits.ndim - 1))
    greedy = sampling.greedy[lead]
    probs = jax.nn.softmax(logits / jnp.where(greedy, 1.0, sampling.temperature[lead]), axis=-1)
    filtered = (sampling.top_k > 0) & (sampling.top_k < logits.shape[-1]) | (sampling.top_p < 1) | (sampling.min_p > 0)
    probs = jax.lax.cond(jnp.any(filtered & ~sampling.greedy), lambda p: _filter(p, sampling, lead), lambda p: p, probs)
    return jnp.where(greedy, jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1]), probs)


def _filter(probs: jax.Array, sampling: Sampling, lead) -> jax.Array:
    v = probs.shape[-1]
    k = jnp.where((sampling.top_k > 0) & (sampling.top_k < v), sampling.top_k, v)[lead]
    probs = _keep(probs, _largest_threshold(probs, lambda t: jnp.sum(probs >= t, axis=-1, keepdims=True) >= k))
    p = sampling.top_p[lead]

    def covered(t):
        return jnp.sum(jnp.where(probs >= t, probs, 0), axis=-1, keepdims=True) >= p

    probs = _keep(probs, jnp.where(p < 1, _largest_threshold(probs, covered), 0.0))
    return _keep(probs, sampling.min_p[lead] * jnp.max(probs, axis=-1, keepdims=True))


def _keep(probs: jax.Array, threshold: jax.Array) -> jax.Array:
    kept = jnp.where(probs >= threshold, probs, 0)
    return kept / jnp.sum(kept, axis=-1, keepdims=True)


def _largest_threshold(probs: jax.Array, holds) -> jax.Array:
    """The largest float t in [0, max probs] for which `holds(t)`, which is monotone, by bisection on the bits of t.

    Non-negative floats order like their bits, so 31 halvings are exact, and no sort of the vocabulary is needed.
    """
    low = jnp.zeros((*probs.shape[:-1], 1), jnp.int32)
    high = jax.lax.bitcast_convert_type(jnp.max(probs, axis=-1, keepdims=True), jnp.int32)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low + 1) // 2
        good = holds(jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    return jax.lax.bitcast_convert_type(jax.lax.fori_loop(0, 31, halve, (low, high))[0], jnp.float32)


def draw(logits: jax.Array, sampling: Sampling, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws one index a row from logits [b, v] with keys [b].

    Returns:
      Indices [b] and the distribution they were drawn from [b, v]. When every row is greedy only the argmax is computed
      and the distribution is void (zeros).
    """

    def greedy():
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), jnp.zeros_like(logits)

    def sampled():
        probs = distribution(logits, sampling)
        return choose(probs, keys), probs

    return jax.lax.cond(jnp.all(sampling.greedy), greedy, sampled)


def choose(probs: jax.Array, keys: jax.Array) -> jax.Array:
    """Draws one index a row from unnormalised probabilities [b, v] with keys [b]; zero entries are never drawn."""
    return jax.vmap(jax.random.categorical)(keys, jnp.log(probs)).astype(jnp.int32)
