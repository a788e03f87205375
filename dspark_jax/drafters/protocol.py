"""What decoding needs of a drafter."""

import dataclasses
from typing import Any, Protocol

import jax

from dspark_jax.decoding.sampling import Sampling
from dspark_jax.models.decoder import Decoder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """One drafted block a row.

    Attributes:
      tokens: [b, g] draft tokens, as target ids.
      probs: [b, g, draft_rows] the exact distribution each was drawn from (void for rows at temperature 0 in a batch
        where every row is).
      draft_ids: [draft_rows] target ids of a reduced draft vocabulary, or None.
      confidence_logits: [b, g]; +inf from a drafter without a confidence head.
      logits: [b, g, draft_rows] corrected draft logits.
    """

    tokens: jax.Array
    probs: jax.Array
    draft_ids: jax.Array | None
    confidence_logits: jax.Array
    logits: jax.Array


class Drafter(Protocol):
    """A drafter: `extend` writes context into its cache, `propose` drafts a block after an anchor.

    Its `config` has block_size, hidden_size, vocab_size, num_target_layers, tap_ids and reads_final_hidden.
    """

    config: Any

    def draft_head(self, target: Decoder) -> jax.Array:
        """What `propose` scores with; computed once, outside the decoding loop."""
        ...

    def create_cache(self, batch: int, slots: int) -> Any: ...

    def extend(self, cache: Any, taps: jax.Array, positions: jax.Array, embedded: jax.Array) -> Any:
        """Writes the context of the tokens at `positions` [b, t], which rise one by one; negative ones are padding.

        A position may be written again after a rejection; what stood behind it is then forgotten.

        Args:
          taps: [b, t, m * d] the target's tapped hidden states of these tokens, or its final ones [b, t, d] if
            `config.reads_final_hidden`.
          embedded: [b, t, d] the target's embeddings of these tokens. A drafter that pairs hidden state i with token
            i + 1 (Eagle3, MTP) needs them; DSpark does not.
        """
        ...

    def propose(
        self,
        target: Decoder,
        head: jax.Array,
        cache: Any,
        anchor: jax.Array,
        position: jax.Array,
        sampling: Sampling,
        keys: jax.Array,
        block_size: int | None = None,
    ) -> tuple[Proposal, Any]:
        """Drafts `block_size` tokens after `anchor` [b], which stands at `position` [b]; keys [b, g]."""
        ...
