"""What requests change of the target's logits, and log probabilities."""

import jax
import jax.numpy as jnp

from serve.engine.request import TOP
from serve.engine.state import Slots, Terms


def changed(logits: jax.Array, slots: Slots, slot: jax.Array, ahead: jax.Array) -> jax.Array:
    """Logits [n, v] as the rows' requests want them; of the target's own where none wants anything.

    Bias first, then the repetition penalty, then presence and frequency, as in vLLM.

    Args:
      slot: [n] of each row; ahead: [n] drafts of the block before it, which count as generated.
    """
    terms = jax.tree.map(lambda x: x[slot], slots.terms)
    some = jnp.any(terms.changes)
    return jax.lax.cond(some, lambda x: _changed(x, slots, terms, slot, ahead), lambda x: x, logits)


def _changed(logits: jax.Array, slots: Slots, t: Terms, slot: jax.Array, ahead: jax.Array) -> jax.Array:
    length = slots.length[slot]
    rows, v = jnp.arange(len(logits))[:, None], logits.shape[1]
    ids = jnp.concatenate([slots.tokens[slot], slots.drafts[slot]], axis=1)
    column, k = jnp.arange(slots.tokens.shape[1]), jnp.arange(slots.drafts.shape[1])
    drafted = k < ahead[:, None]
    there = jnp.concatenate([column < length[:, None], drafted], axis=1)
    new = jnp.concatenate([(column >= t.prompt_length[:, None]) & (column < length[:, None]), drafted], axis=1)
    count = jnp.zeros(logits.shape, jnp.float32).at[rows, ids].add(new.astype(jnp.float32))
    seen = jnp.zeros(logits.shape, bool).at[rows, ids].max(there)
    logits = logits.at[rows, jnp.where(t.bias_ids < 0, v, t.bias_ids)].add(t.bias, mode="drop")
    rate = t.repetition[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / rate, logits * rate), logits)
    logits = logits - t.frequency[:, None] * count - t.presence[:, None] * (count > 0)
    early = length + ahead < t.min_length
    stops = jnp.where(early[:, None] & (t.stop_ids >= 0), t.stop_ids, v)
    return logits.at[rows, stops].set(-jnp.inf, mode="drop")


def logprobs_of(logits: jax.Array, tokens: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log probabilities [n] of tokens [n], and ids and log probabilities [n, TOP] of the most likely ones.

    Zeros where none of `wanted` [n] is set.
    """
    n, top = len(tokens), min(TOP, logits.shape[1])

    def compute(logits):
        logs = jax.nn.log_softmax(logits, axis=-1)
        values, ids = jax.lax.top_k(logs, top)
        pad = ((0, 0), (0, TOP - top))
        own = jnp.take_along_axis(logs, tokens[:, None], axis=1)[:, 0]
        return own, jnp.pad(ids, pad), jnp.pad(values, pad, constant_values=-jnp.inf)

    def nothing(logits):
        return jnp.zeros(n), jnp.zeros((n, TOP), jnp.int32), jnp.zeros((n, TOP))

    return jax.lax.cond(jnp.any(wanted), compute, nothing, logits)
