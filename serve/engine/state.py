"""What the device keeps of all requests from step to step, one slot a request."""

import dataclasses

import jax
from jax.sharding import PartitionSpec as P

from dspark_jax.decoding.sampling import Sampling
from dspark_jax.decoding.state import Finish
from serve.engine.attention import PAGES

BIASES = 320
"""Ids with a bias a request may have; OpenAI allows 300."""

STOPS = 32
"""Stop ids a request may have."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Terms:
    """What requests ask for: arrays with the slots as first axis, or those of one request without it.

    Attributes:
      prompt_length: []; limit: [] length at which it ends; min_length: [] length before which no stop id is drawn.
      keys: [] request key; stop_ids: [STOPS], -1 pads.
      presence, frequency: [] subtracted from the logits of tokens generated before, once and for each time.
      repetition: [] divides the positive and multiplies the negative logits of all tokens before.
      bias_ids: [BIASES], -1 pads; bias: [BIASES] added to their logits.
      logprobs: [] boolean: wanted; speculative: [] boolean: may be drafted for.
    """

    prompt_length: jax.Array
    limit: jax.Array
    min_length: jax.Array
    keys: jax.Array
    sampling: Sampling
    stop_ids: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    bias_ids: jax.Array
    bias: jax.Array
    logprobs: jax.Array
    speculative: jax.Array

    @property
    def changes(self) -> jax.Array:
        """[s] booleans: requests whose logits are not the target's own."""
        penalized = (self.presence != 0) | (self.frequency != 0) | (self.repetition != 1)
        return penalized | (self.bias_ids[:, 0] >= 0) | (self.min_length > self.prompt_length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """All requests on the device; every leaf but the pages and `probs` has the slots as its first axis.

    Attributes:
      tokens: [s, positions]; the token at position i stands in column i.
      length: [s] tokens known; the anchor stands at length - 1.
      computed: [s] positions whose keys and values are there.
      finish: [s] `Finish` codes.
      drafts: [s, g] of the block drafted last; confidence: [s, g] logits; probs: [s * g, draft_rows] what they were
        drawn from, in rows, since a row of three axes cannot be read without the rest on a TPU.
      pages, draft_pages: of target and drafter, see `PagedCache`.
    """

    terms: Terms
    tokens: jax.Array
    length: jax.Array
    computed: jax.Array
    finish: jax.Array
    drafts: jax.Array
    probs: jax.Array
    confidence: jax.Array
    pages: tuple[jax.Array, ...]
    draft_pages: tuple[jax.Array, ...]

    @property
    def running(self) -> jax.Array:
        """[s] booleans."""
        return self.finish == Finish.RUNNING

    def settled(self) -> "Slots":
        """The same, told to lie as the first ones did on a mesh: pages split by heads, the rest everywhere.

        A program that left them otherwise would make the next one compile anew.
        """
        if jax.sharding.get_abstract_mesh().empty:
            return self

        def lie(spec: P, tree):
            return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, spec), tree)

        rest = lie(P(), self.replace(pages=(), draft_pages=()))
        return rest.replace(pages=lie(PAGES, self.pages), draft_pages=lie(PAGES, self.draft_pages))

    def replace(self, **changes) -> "Slots":
        return dataclasses.replace(self, **changes)
