"""Configuration of a drafter, read from and written to the released `config.json` layout."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from dspark_jax.drafters.released_config import ReleasedConfig
from dspark_jax.models.fields import flag, given, items, whole
from dspark_jax.models.rope import RopeConfig

HeadType = Literal["vanilla", "gated", "rnn"]
ARCHITECTURE = "Qwen3DSparkModel"


@dataclass(frozen=True)
class DrafterConfig(ReleasedConfig):
    """Shape and conventions of a DSpark or DFlash drafter.

    Attributes:
      block_size: gamma, draft tokens a round.
      first_slot: input slot that makes the first prediction: 0 (the anchor's own slot, DSpark) or 1 (DFlash).
      tap_ids: target layers whose outputs are injected.
      num_target_layers: depth of the target it was trained for.
      mask_token_id: embedded at every block slot but the anchor's.
      markov_rank: rank of the sequential head; 0 is DFlash, no head.
      confidence_with_markov: the confidence head also reads the previous token's Markov embedding.
      draft_vocab_size: rows of the reduced draft vocabulary; 0 drafts from the target's whole vocabulary.
      num_anchors: blocks sampled a sequence in training (kept for the record).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    tap_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    first_slot: int = 0
    markov_rank: int = 0
    markov_head_type: HeadType = "vanilla"
    confidence_head: bool = False
    confidence_with_markov: bool = False
    draft_vocab_size: int = 0
    num_anchors: int = 512
    attention_bias: bool = False
    max_positions: int = 8192
    qk_norm: bool = True
    mlp_bias: bool = False

    reads_final_hidden: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first_slot not in (0, 1):
            raise ValueError(f"first_slot must be 0 (DSpark) or 1 (DFlash), got {self.first_slot}.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the embedding table of {self.vocab_size} rows; "
                "expected a padded or reserved row inside it."
            )
        if self.markov_head_type not in ("vanilla", "gated", "rnn"):
            raise ValueError(f"markov_head_type {self.markov_head_type!r} unknown; expected vanilla, gated or rnn.")
        if self.confidence_with_markov and not (self.confidence_head and self.markov_rank):
            raise ValueError("confidence_head_with_markov needs a confidence head and markov_rank > 0.")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DrafterConfig":
        """Reads a released drafter's `config.json` (DeepSpec `Qwen3DSparkModel`).

        Raises:
          ValueError: another architecture, a sliding window, or a field that is absent or of another type.
        """
        architecture = (items(config, "architectures") or [None])[0]
        if architecture != ARCHITECTURE:
            raise ValueError(f"drafter architecture {architecture!r} is not supported; expected {ARCHITECTURE!r}.")
        shared = cls.read_shared(config, ("block_size", "mask_token_id"))
        confidence = flag(config, "enable_confidence_head")
        return cls(
            **shared,
            block_size=whole("block_size", config["block_size"]),
            mask_token_id=whole("mask_token_id", config["mask_token_id"], least=None),
            first_slot=whole("first_prediction_slot", config.get("first_prediction_slot", 0), least=None),
            markov_rank=whole("markov_rank", given(config, "markov_rank", 0), least=0),
            markov_head_type=given(config, "markov_head_type", "vanilla"),
            confidence_head=confidence,
            confidence_with_markov=confidence and flag(config, "confidence_head_with_markov"),
            num_anchors=whole("num_anchors", config.get("num_anchors", 512), least=0),
        )

    def to_hf(self) -> dict[str, Any]:
        """The released `config.json`; the fields beyond it stand only where they differ from that layout."""
        extra: dict[str, Any] = {}
        if self.first_slot:
            extra["first_prediction_slot"] = self.first_slot
        if self.markov_rank:
            extra["markov_head_type"] = self.markov_head_type
        if self.confidence_head:
            extra["confidence_head_with_markov"] = self.confidence_with_markov
        return {
            **self.write_shared(ARCHITECTURE),
            "block_size": self.block_size,
            "enable_confidence_head": self.confidence_head,
            "markov_rank": self.markov_rank,
            "mask_token_id": self.mask_token_id,
            "num_anchors": self.num_anchors,
            **extra,
        }
