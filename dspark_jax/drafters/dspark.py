"""DSpark: a DFlash backbone, a sequential head and a confidence head. With rank 0 it is DFlash."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.decoding.sampling import Sampling, draw
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.heads import HEADS, ConfidenceHead
from dspark_jax.drafters.layer import DraftLayer, block_mix
from dspark_jax.drafters.protocol import Proposal
from dspark_jax.drafters.vocabulary import DraftVocabulary
from dspark_jax.models.cache import BlockCache, DenseCache
from dspark_jax.models.decoder import Decoder
from dspark_jax.models.layers import Linear, RMSNorm, linear
from dspark_jax.models.rope import rotate, rotation


class DSpark(DraftVocabulary):
    """The semi-autoregressive drafter. Embedding and head are the target's own and are passed in, never stored."""

    config: DrafterConfig

    def __init__(self, config: DrafterConfig, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config)
        d, taps = config.hidden_size, len(config.tap_ids)
        self.fc = Linear(taps * d, d, bias=False, dtype=dtype, rngs=rngs)
        self.context_norm = RMSNorm(d, config.rms_norm_eps, dtype)
        self.layers = nnx.List([DraftLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(d, config.rms_norm_eps, dtype)
        head = HEADS[config.markov_head_type] if config.markov_rank else None
        self.markov = head(config, dtype=dtype, rngs=rngs) if head else None
        self.confidence = ConfidenceHead(config, dtype=dtype, rngs=rngs) if config.confidence_head else None

    @property
    def dtype(self) -> jnp.dtype:
        return self.fc.weight.dtype

    def create_cache(self, batch: int, slots: int) -> DenseCache:
        """An empty context cache; `slots` must leave room for a whole block after the last position."""
        c = self.config
        return DenseCache.create(c.num_layers, batch, slots, c.num_kv_heads, c.head_dim, self.dtype)

    def context(self, taps: jax.Array) -> jax.Array:
        """Tapped hidden states [..., m * d] -> context features [..., d] (equation 2)."""
        return self.context_norm(self.fc(taps.astype(self.dtype)))

    def extend(
        self, cache: BlockCache, taps: jax.Array, positions: jax.Array, embedded: jax.Array | None = None
    ) -> BlockCache:
        """Injects context: taps [b, t, m * d] of the tokens at `positions` [b, t] become keys and values.

        What was `embedded` there is not read: see `Drafter.extend`.
        """
        features = self.context(taps)
        cos, sin = rotation(self.config.rope, self.config.head_dim, positions)
        for i, layer in enumerate(self.layers):
            k, v = layer.attention.context(features)
            cache = cache.write(i, rotate(k, cos, sin), v, positions)
        return cache

    def backbone(self, cache: BlockCache, embedded: jax.Array, position: jax.Array) -> tuple[jax.Array, BlockCache]:
        """One bidirectional pass over blocks.

        The block's own keys are parked in the cache slots from the anchor on. They are visible to this block only: the
        context of those positions overwrites them before a later block can see them.

        Args:
          embedded: [b, slots, d] anchor and mask embeddings; position: [b] of the anchor.

        Returns:
          Normed hidden states of the predicting slots [b, g, d] and the cache.
        """
        c = self.config
        x = embedded.astype(self.dtype)
        positions = position[:, None] + jnp.arange(x.shape[1])
        cos, sin = rotation(c.rope, c.head_dim, positions)
        for i, layer in enumerate(self.layers):
            q, k, v = layer.attention.split(layer.attention_norm(x))
            mixed, cache = cache.attend_block(i, rotate(q, cos, sin), rotate(k, cos, sin), v, positions)
            x = layer.finish(x, mixed)
        return self.norm(x)[:, c.first_slot :], cache

    def propose(
        self,
        target: Decoder,
        head: jax.Array,
        cache: BlockCache,
        anchor: jax.Array,
        position: jax.Array,
        sampling: Sampling,
        keys: jax.Array,
        block_size: int | None = None,
    ) -> tuple[Proposal, BlockCache]:
        """Drafts one block a row (equation 4). See `Drafter.propose`."""
        c = self.config
        g = self.drafts(block_size)
        masks = jnp.full((anchor.shape[0], c.block_size + c.first_slot - 1), c.mask_token_id, anchor.dtype)
        embedded = target.embed(jnp.concatenate([anchor[:, None], masks], axis=1))
        hidden, cache = self.backbone(cache, embedded, position)
        hidden = hidden[:, :g]
        base = self.base_logits(target, head, hidden)
        return self.correct(base, hidden, anchor, sampling, keys), cache

    def correct(
        self, base: jax.Array, hidden: jax.Array, anchor: jax.Array, sampling: Sampling, keys: jax.Array
    ) -> Proposal:
        """Walks the block, adding the sequential bias and drawing token after token.

        Args:
          base: [b, g, draft_rows]; hidden: [b, g, d]; anchor: [b]; keys: [b, g], one for every draw.
        """
        shape = (anchor.shape[0],)
        state = self.markov.initial_state(shape, hidden.dtype) if self.markov else jnp.zeros((*shape, 0))

        def body(carry, inputs):
            previous, state = carry
            base, hidden, key = inputs
            embedded = None
            if self.markov:
                embedded = self.markov.embed(previous)
                latent, state = self.markov.step(previous, hidden, state)
                base = base + linear(latent, self.markov.w2[...]).astype(jnp.float32)
            row, q = draw(base, sampling, key)
            token = self.token(row)
            confidence = self.confidence(hidden, embedded) if self.confidence else jnp.full(shape, jnp.inf)
            return (token, state), (token, base, q, confidence)

        steps = (jnp.moveaxis(base, 1, 0), jnp.moveaxis(hidden, 1, 0), jnp.moveaxis(keys, 1, 0))
        outputs = jax.lax.scan(body, (anchor, state), steps)[1]
        tokens, logits, q, confidence = (jnp.moveaxis(x, 0, 1) for x in outputs)
        return Proposal(tokens, q, self.rows, confidence, logits)

    def blocks(
        self,
        target: Decoder,
        tokens: jax.Array,
        taps: jax.Array,
        anchors: jax.Array,
        positions: jax.Array,
        segments: jax.Array,
        attention_chunk: int = 0,
        remat: bool = False,
        attention: str = "plain",
    ) -> jax.Array:
        """Training forward: independent blocks at sampled anchors.

        Args:
          tokens: [b, t]; taps: [b, t, m * d]; anchors: [b, a] indices into t; positions, segments: [b, t] position in
            its document and document number of every token. A block sees the context of its own document strictly
            before the anchor, and itself.
          attention_chunk, attention: see `block_mix`.
          remat: keep one array a layer for the backward pass, and compute the rest again there.

        Returns:
          Normed hidden states [b, a, g, d].
        """
        c = self.config
        b, a = anchors.shape
        width = c.block_size + c.first_slot
        at = lambda x: jnp.take_along_axis(x, anchors, axis=1)  # noqa: E731
        masks = jnp.full((b, a, width - 1), c.mask_token_id, tokens.dtype)
        x = target.embed(jnp.concatenate([at(tokens)[..., None], masks], axis=-1)).astype(self.dtype)
        features = self.context(taps)
        context_rotation = rotation(c.rope, c.head_dim, positions)
        block_rotation = rotation(c.rope, c.head_dim, at(positions)[..., None] + jnp.arange(width))
        documents = at(segments)

        def run(layer: DraftLayer, x: jax.Array, features: jax.Array) -> jax.Array:
            k, v = layer.attention.context(features)
            q, k_block, v_block = layer.attention.split(layer.attention_norm(x))
            q, k_block = rotate(q, *block_rotation), rotate(k_block, *block_rotation)
            k = rotate(k, *context_rotation)
            own = k_block, v_block, anchors, documents
            return layer.finish(x, block_mix(q, k, v, segments, *own, attention_chunk, attention))

        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"draft_layer_{i}"):
                one = partial(run, layer)
                x = (jax.checkpoint(one) if remat else one)(x, features)
        return self.norm(x)[:, :, c.first_slot :]

    def latents(self, previous: jax.Array, hidden: jax.Array) -> jax.Array | None:
        """Teacher-forced latents [..., g, r] of the sequential head, or None without one."""
        return self.markov.block(previous, hidden) if self.markov else None

    def confidence_logits(self, previous: jax.Array, hidden: jax.Array) -> jax.Array | None:
        """Confidence logits [..., g] for previous ids [..., g] and hidden [..., g, d], or None without the head."""
        if self.confidence is None:
            return None
        return self.confidence(hidden, self.markov.embed(previous) if self.markov else None)
