"""What drafts are drawn from: the target's vocabulary, or a part of it, scored with the target's own head."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.models.decoder import Decoder, tokens_only
from dspark_jax.models.layers import linear


class DraftIds(nnx.Variable):
    """Target ids of the draft vocabulary: part of the checkpoint, never trained."""


class DraftVocabulary(nnx.Module):
    """The part of a drafter that all kinds share.

    `draft_ids` [draft_vocab_size] lists the target ids of a reduced draft vocabulary, ascending; None drafts from all.
    """

    def __init__(self, config: Any):
        self.config = config
        reduced = config.draft_vocab_size
        self.draft_ids = DraftIds(jnp.arange(reduced, dtype=jnp.int32)) if reduced else None

    def drafts(self, block_size: int | None) -> int:
        """Drafts of a block that was asked for, None for as many as the drafter was trained for.

        Raises:
          ValueError: none, or more than that.
        """
        most = self.config.block_size
        g = most if block_size is None else block_size
        if not 0 < g <= most:
            raise ValueError(f"block_size must be within 1..{most}, the size trained for; got {g}.")
        return g

    @property
    def rows(self) -> jax.Array | None:
        """Target ids [draft_rows] of what is drawn from, or None where it is every token."""
        return None if self.draft_ids is None else self.draft_ids[...]

    def token(self, row: jax.Array) -> jax.Array:
        """Target ids [...] of rows [...] drawn."""
        return row if self.draft_ids is None else self.draft_ids[row]

    def draft_head(self, target: Decoder) -> jax.Array:
        """The head drafts are scored with: the target's own [v, d], or its rows of the draft vocabulary."""
        weight = target.head_weight
        return weight if self.draft_ids is None else weight[self.draft_ids[...]]

    def base_logits(self, target: Decoder, head: jax.Array, hidden: jax.Array) -> jax.Array:
        """U_k: float32 logits [..., draft_rows] of hidden [..., d]; rows that are no real token get -inf."""
        logits = linear(hidden, head).astype(jnp.float32)
        return tokens_only(logits, target.config.vocab_size, target.config.num_tokens, self.rows)
