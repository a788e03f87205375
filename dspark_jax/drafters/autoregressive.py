"""What Eagle3 and MTP share: one layer run g times a round, each time on the token it drew and the state it left.

Hidden state i stands with token i + 1, at position i: the row that drafts after the anchor x_0 at position p is row
p - 1, made of the target's state there and the embedding of x_0. The rows of further drafts have the drafter's own last
state in place of the target's.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.decoding.sampling import Sampling, draw
from dspark_jax.drafters.autoregressive_config import AutoregressiveConfig
from dspark_jax.drafters.layer import DraftLayer, block_mix
from dspark_jax.drafters.paired_cache import PairedCache
from dspark_jax.drafters.protocol import Proposal
from dspark_jax.drafters.vocabulary import DraftVocabulary
from dspark_jax.models.cache import DenseCache
from dspark_jax.models.decoder import Decoder
from dspark_jax.models.layers import Linear, RMSNorm
from dspark_jax.models.rope import rotate, rotation


class Autoregressive(DraftVocabulary):
    """An Eagle3 or MTP drafter; see `enter` for what sets them apart.

    Embedding and head are the target's own and are passed in, never stored.
    """

    config: AutoregressiveConfig
    markov = None
    confidence = None

    def __init__(self, config: AutoregressiveConfig, inputs: tuple[int, int], attended: int, *, dtype, rngs):
        """Args:
        inputs: outputs and inputs of `fc`; attended: width that attention reads.
        """
        super().__init__(config)
        d, eps = config.hidden_size, config.rms_norm_eps
        self.fc = Linear(inputs[1], inputs[0], bias=False, dtype=dtype, rngs=rngs)
        self.hidden_norm = RMSNorm(d, eps, dtype)
        self.layer = DraftLayer(config, inputs=attended, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(d, eps, dtype)

    @property
    def dtype(self) -> jnp.dtype:
        return self.fc.weight.dtype

    def project(self, read: jax.Array) -> jax.Array:
        """What `extend` is given of the target [..., m * d] or [..., d] -> states [..., d]."""
        raise NotImplementedError

    def enter(self, embedded: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Embeddings [..., d] and states [..., d] of rows -> their residual stream and what attention reads."""
        raise NotImplementedError

    def create_cache(self, batch: int, slots: int) -> PairedCache:
        """An empty context cache; `slots` must leave room for a whole block after the last position."""
        c = self.config
        context = DenseCache.create(1, batch, slots, c.num_kv_heads, c.head_dim, self.dtype)
        return PairedCache(context, jnp.zeros((batch, c.block_size + 1, c.hidden_size), self.dtype))

    def extend(self, cache: PairedCache, read: jax.Array, positions: jax.Array, embedded: jax.Array) -> PairedCache:
        """Completes the rows before `positions` [b, t] by the tokens that stand there. See `Drafter.extend`.

        `read` is taps [b, t, m * d] or final hidden states [b, t, d].
        """
        states = self.project(read.astype(self.dtype))
        first = cache.state(positions[:, 0] - 1)
        before = jnp.concatenate([first[:, None], states[:, :-1]], axis=1)
        k, v = self.layer.attention.context(self.enter(embedded.astype(self.dtype), before)[1])
        # Position 0 completes no row, and a position of padding none either: both come out negative.
        context = cache.context.write(0, rotate(k, *self._rotation(positions - 1)), v, positions - 1)
        return dataclasses.replace(cache, context=context).keep(states, positions)

    def propose(
        self,
        target: Decoder,
        head: jax.Array,
        cache: PairedCache,
        anchor: jax.Array,
        position: jax.Array,
        sampling: Sampling,
        keys: jax.Array,
        block_size: int | None = None,
    ) -> tuple[Proposal, PairedCache]:
        """Drafts token by token. See `Drafter.propose`.

        The rows of drafts are parked in the cache's slots from the anchor's on. A later block sees none of them: its
        own rows, and the context of the tokens accepted, are written there before.
        """
        g = self.drafts(block_size)

        def body(carry, inputs):
            token, state, context = carry
            step, key = inputs
            at = (position - 1 + step)[:, None]
            x, attended = self.enter(target.embed(token)[:, None].astype(self.dtype), state[:, None])
            q, k, v = self.layer.attention.split(attended)
            turn = self._rotation(at)
            mixed, context = context.attend(0, rotate(q, *turn), rotate(k, *turn), v, at)
            state = self.layer.finish(x, mixed)[:, 0]
            logits = self.base_logits(target, head, self.norm(state))
            row, probs = draw(logits, sampling, key)
            token = self.token(row).astype(anchor.dtype)
            return (token, state, context), (token, logits, probs)

        start = anchor, cache.state(position - 1), cache.context
        steps = jnp.arange(g), jnp.moveaxis(keys[:, :g], 1, 0)
        (_, _, context), outputs = jax.lax.scan(body, start, steps)
        tokens, logits, probs = (jnp.moveaxis(x, 0, 1) for x in outputs)
        certain = jnp.full(tokens.shape, jnp.inf)
        return Proposal(tokens, probs, self.rows, certain, logits), dataclasses.replace(cache, context=context)

    def blocks(
        self,
        target: Decoder,
        tokens: jax.Array,
        read: jax.Array,
        anchors: jax.Array,
        positions: jax.Array,
        segments: jax.Array,
        attention_chunk: int = 0,
        remat: bool = False,
        attention: str = "plain",
    ) -> jax.Array:
        """Training-time test (arXiv 2503.01840, section 3.2): blocks at sampled anchors, on the drafter's own states.

        Step k of a block reads token x_k of the document and what step k - 1 left; it sees the target's states strictly
        before the anchor, and the block's steps up to its own.

        Args:
          tokens: [b, t]; read: [b, t, m * d] taps or [b, t, d] final hidden states; anchors: [b, a] indices into t;
            positions, segments: [b, t] position in its document and document number of every token.
          attention_chunk, attention: see `block_mix`.
          remat: keep the states of each step for the backward pass, and compute the rest again there.

        Returns:
          Normed hidden states [b, a, g, d].
        """
        states = self.project(read.astype(self.dtype))
        following = target.embed(jnp.roll(tokens, -1, axis=1)).astype(self.dtype)
        k, v = self.layer.attention.context(self.enter(following, states)[1])
        k = rotate(k, *self._rotation(positions))
        at = lambda x: jnp.take_along_axis(x, anchors, axis=1)  # noqa: E731
        seen = anchors - 1, at(segments)
        state = jnp.take_along_axis(states, jnp.maximum(anchors - 1, 0)[..., None], axis=1)
        # A document's first token has no state before it.
        state = jnp.where(at(positions)[..., None] > 0, state, 0)

        def run(step: int, state: jax.Array, keys: tuple[jax.Array, ...], values: tuple[jax.Array, ...]):
            index = jnp.minimum(anchors + step, tokens.shape[1] - 1)
            embedded = target.embed(jnp.take_along_axis(tokens, index, axis=1)).astype(self.dtype)
            x, attended = self.enter(embedded, state)
            q, own_key, own_value = self.layer.attention.split(attended[:, :, None])
            turn = self._rotation(at(positions)[..., None] - 1 + step)
            keys, values = (*keys, rotate(own_key, *turn)), (*values, own_value)
            own = jnp.concatenate(keys, axis=2), jnp.concatenate(values, axis=2)
            mixed = block_mix(rotate(q, *turn), k, v, segments, *own, *seen, attention_chunk, attention)
            return self.layer.finish(x[:, :, None], mixed)[:, :, 0], keys, values

        outputs, keys, values = [], (), ()
        for step in range(self.config.block_size):
            with jax.named_scope(f"step_{step}"):
                one = partial(run, step)
                state, keys, values = (jax.checkpoint(one) if remat else one)(state, keys, values)
                outputs.append(self.norm(state))
        return jnp.stack(outputs, axis=2)

    def latents(self, previous: jax.Array, hidden: jax.Array) -> None:
        """There is no sequential head: the layer itself is sequential."""

    def confidence_logits(self, previous: jax.Array, hidden: jax.Array) -> None:
        """There is no confidence head."""

    def _rotation(self, positions: jax.Array) -> tuple[Any, Any]:
        return rotation(self.config.rope, self.config.head_dim, positions)
