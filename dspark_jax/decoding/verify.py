"""Exact verification: rejection sampling with the residual and the bonus draw (Leviathan et al., 2023)."""

import jax
import jax.numpy as jnp

from dspark_jax.decoding.keys import Purpose, slot_key, slot_keys
from dspark_jax.decoding.sampling import Sampling, choose, distribution
from dspark_jax.drafters.protocol import Proposal


def verify(
    logits: jax.Array, proposal: Proposal, lengths: jax.Array, sampling: Sampling, keys: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Accepts a prefix of each draft and draws the token after it.

    Slot k (from 0) is accepted with probability min(1, p(x) / q(x)). At the first rejection the next token comes from
    norm(max(p - q, 0)); after `lengths` accepted drafts it comes from p itself. The emitted tokens follow the target's
    law for any lengths that do not depend on the draft tokens they admit.

    Args:
      logits: [b, w, v] target logits at the anchor and the first w - 1 draft tokens.
      proposal: the drafts; at least w - 1 of them.
      lengths: [b] drafts to verify, each at most w - 1.
      keys: [b] request keys; position: [b] of the anchor.

    Returns:
      Accepted drafts [b] and the next token [b].
    """
    width = logits.shape[1]
    drafts = proposal.tokens[:, : width - 1]

    def greedy():
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        accepted = _prefix(drafts == best[:, :-1], lengths)
        return accepted, _at(best, accepted)

    def sampled():
        p = distribution(logits, sampling)
        q = spread(proposal.probs[:, : width - 1], proposal.draft_ids, logits.shape[-1])
        uniform = jax.vmap(jax.vmap(jax.random.uniform))(slot_keys(keys, position, Purpose.ACCEPT, max(width - 1, 1)))
        accepted = _prefix(uniform[:, : width - 1] < accept_probability(p, q, drafts), lengths)
        purpose = jnp.where(accepted < lengths, Purpose.RESIDUAL, Purpose.BONUS)
        key = slot_key(keys, position, purpose, accepted)
        return accepted, choose(next_distribution(p, q, accepted, lengths), key)

    return jax.lax.cond(jnp.all(sampling.greedy), greedy, sampled)


def accept_probability(p: jax.Array, q: jax.Array, drafts: jax.Array) -> jax.Array:
    """Probability [b, w - 1] that a draft survives its own test, min(1, p(x) / q(x)); equal p and q give exactly 1.

    Args:
      p: [b, w, v] target distributions; q: [b, w - 1, v] what the drafts [b, w - 1] were drawn from.
    """
    p, q = _pick(p[:, :-1], drafts), _pick(q, drafts)
    return jnp.minimum(p / jnp.maximum(q, jnp.finfo(q.dtype).tiny), 1)


def next_distribution(p: jax.Array, q: jax.Array, accepted: jax.Array, lengths: jax.Array) -> jax.Array:
    """Unnormalised law [b, v] of the token after `accepted` [b] drafts: the residual after a rejection, else p."""
    q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
    return residual(_at(p, accepted), _at(q, accepted), accepted < lengths)


def residual(p: jax.Array, q: jax.Array, rejected: jax.Array) -> jax.Array:
    """Unnormalised law [b, v] of the next token: max(p - q, 0) where a draft of q was rejected [b], else p."""
    left = jnp.maximum(p - q, 0)
    # Rounding can leave a residual without mass although a token was rejected; p is then the right law to 1e-7.
    use = rejected & (jnp.sum(left, axis=-1) > 0)
    return jnp.where(use[:, None], left, p)


def spread(q: jax.Array, draft_ids: jax.Array | None, vocab_size: int) -> jax.Array:
    """A distribution over the draft vocabulary [..., draft_rows] as one over all tokens [..., v]."""
    if draft_ids is None:
        return q
    return jnp.zeros((*q.shape[:-1], vocab_size), q.dtype).at[..., draft_ids].set(q, unique_indices=True)


def _prefix(good: jax.Array, lengths: jax.Array) -> jax.Array:
    good = good & (jnp.arange(good.shape[1]) < lengths[:, None])
    return jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _at(x: jax.Array, slot: jax.Array) -> jax.Array:
    """x [b, w, ...] at one slot a row [b]."""
    return jax.vmap(lambda row, i: row[i])(x, slot)


def _pick(probs: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]
