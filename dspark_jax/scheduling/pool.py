"""The pool of draft tokens that one verification could hold, in the order in which they are admitted."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from dspark_jax.scheduling.costs import StepCosts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Round:
    """What is known of a round before anything is drafted.

    Attributes:
      running: [r] booleans; other rows take no part.
      room: [r] most drafts a request can still take.
      padded: the step is a rectangle of all r rows, as wide as the longest request needs. Otherwise tokens are packed
        and a step holds B = sum(1 + l_r) of them.
    """

    running: jax.Array
    room: jax.Array
    padded: bool = field(default=False, metadata={"static": True})

    @property
    def requests(self) -> jax.Array:
        """Running requests."""
        return jnp.sum(self.running, dtype=jnp.int32)

    def fits(self, block_size: int) -> jax.Array:
        """[r, g] drafts that may be verified at all."""
        return self.running[:, None] & (jnp.arange(block_size) < self.room[:, None])

    def step(self, costs: StepCosts, drafts: jax.Array, drafted: bool = True) -> jax.Array:
        """Seconds of the step that verifies `drafts` [...]: draft tokens if packed, drafts of every row if padded."""
        if self.padded:
            rows = self.running.shape[0]
            return costs.seconds(rows, rows * (1 + drafts), drafted)
        return costs.seconds(self.requests, self.requests + drafts, drafted)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pool:
    """Candidates in admission order. Its unit is one draft token if packed, one draft of every row if padded.

    The order is survival descending, position ascending, request ascending. Survival never rises along a request, so
    whatever is admitted is a prefix of every request (Lemma 1), and no other choice of as many is worth more (Lemma 2).
    The next candidate's survival is known before it or anything behind it is drawn, so rules that walk this order, and
    stop by what they have passed, keep the output law.

    Attributes:
      tau: [n + 1] expected tokens of the round with the first m units admitted, m at least `least`.
      seconds: [n + 1] of that step; it never falls.
      least, most: units admitted in any case, and units that can be.
      value: [r, g] what the order goes by; 0 where there is no candidate.
      ordered: [r * g] values, descending; none if padded.
      round: whose candidates they are.
    """

    tau: jax.Array
    seconds: jax.Array
    least: jax.Array
    most: jax.Array
    value: jax.Array
    ordered: jax.Array | None
    round: Round

    @property
    def theta(self) -> jax.Array:
        """[n + 1] expected tokens per second, Theta = tau * SPS(B)."""
        return self.tau / self.seconds

    def lengths(self, admitted: jax.Array) -> jax.Array:
        """Lengths [r] with the first `admitted` units, at most `most`."""
        if self.ordered is not None:
            return admit(self.value, admitted, self.ordered)
        g = self.value.shape[1]
        chosen = self.round.fits(g) & (jnp.arange(g) < admitted)
        return jnp.sum(chosen, axis=-1, dtype=jnp.int32)

    def early_stop(self, minimum_gain: float = 0.0) -> jax.Array:
        """Units admitted by Algorithm 1: it stops at the first candidate that does not raise Theta.

        A candidate that needs a dearer step must raise Theta by `minimum_gain`, as a share. The rule is applied to each
        alone: to give the whole gain back at the end if it is small would decide on tokens by what they drew.
        """
        dearer = self.seconds[1:] > self.seconds[:-1]
        pays = self.theta[1:] > self.theta[:-1] * jnp.where(dearer, 1 + minimum_gain, 1)
        units = jnp.arange(len(pays))
        goes_on = (pays | (units < self.least)) & (units < self.most)
        return jnp.where(jnp.all(goes_on), len(units), jnp.argmin(goes_on))

    def best(self, minimum_gain: float = 0.0) -> jax.Array:
        """Units with the largest Theta of all, the fewest of equals; the least if the gain over that is small.

        The search sees every candidate. On survival of the round it decides about, it would bend the output law.
        """
        units = jnp.arange(len(self.tau))
        theta = jnp.where((units >= self.least) & (units <= self.most), self.theta, -1)
        best = jnp.argmax(theta)
        return jnp.where(theta[best] >= (1 + minimum_gain) * theta[self.least], best, self.least)

    def bucket(self, admitted: jax.Array) -> jax.Array:
        """Units that cost no more than `admitted` ones do."""
        return jnp.maximum(jnp.sum(self.seconds <= self.seconds[admitted], dtype=jnp.int32) - 1, admitted)


def pool(survival: jax.Array, round: Round, costs: StepCosts, floor: int = 0) -> Pool:
    """The candidates of a round by survival [r, g], never rising along g; drafts that surely die (survival 0, or no
    number at all) are none.

    Args:
      floor: drafts of every request that are admitted first and in any case, as far as a step can hold them.
    """
    fits = round.fits(survival.shape[1])
    # A product taken in another order can rise by a rounding, and a draft would overtake the one before it.
    survival = jax.lax.cummin(jnp.where(fits & (survival > 0), survival, 0), axis=1)
    sure = fits & (jnp.arange(survival.shape[1]) < floor)
    value = jnp.where(sure, SURE, survival)
    if round.padded:
        candidate, sure, ordered = jnp.any(value > 0, axis=0), jnp.any(sure, axis=0), None
        tau = round.requests + jnp.cumsum(jnp.sum(survival, axis=0))
    else:
        candidate, ordered = value > 0, _descending(value.ravel())
        tau = round.requests + jnp.sum(survival, where=sure) + jnp.cumsum(jnp.where(ordered == SURE, 0, ordered))
    tau = jnp.concatenate([round.requests[None], tau])
    seconds = round.step(costs, jnp.arange(len(tau)))
    possible = jnp.maximum(jnp.sum(jnp.isfinite(seconds), dtype=jnp.int32) - 1, 0)
    most = jnp.minimum(jnp.sum(candidate, dtype=jnp.int32), possible)
    least = jnp.minimum(jnp.sum(sure, dtype=jnp.int32), most)
    return Pool(tau, seconds, least, most, value, ordered, round)


SURE = 2.0
"""The value of drafts that are admitted in any case: above every survival."""


def _descending(values: jax.Array) -> jax.Array:
    """Sorts non-negative float32 values [n] by their bits, which order alike; XLA sorts integers faster on CPUs."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jax.lax.bitcast_convert_type(-jax.lax.sort(-bits, is_stable=False), jnp.float32)


def admit(value: jax.Array, admitted: jax.Array, ordered: jax.Array | None = None) -> jax.Array:
    """Lengths [r] of the first `admitted` drafts by value [r, g], which never rises along g and is 0 for none.

    Ties are admitted by position, then by request.

    Args:
      ordered: [r * g] values, descending, where they are sorted already.
    """
    r, g = value.shape
    ordered = _descending(value.ravel()) if ordered is None else ordered
    # Position-major, so that counting along it breaks ties by position, then by request.
    values = value.T.ravel()
    last = ordered[jnp.maximum(admitted, 1) - 1]
    ties = values == last
    wanted = admitted - jnp.sum(values > last, dtype=jnp.int32)
    chosen = (values > last) | (ties & (jnp.cumsum(ties, dtype=jnp.int32) <= wanted))
    chosen = chosen.reshape(g, r).T & (admitted > 0)
    return jnp.sum(chosen, axis=-1, dtype=jnp.int32)
