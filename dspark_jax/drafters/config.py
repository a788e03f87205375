"""Configuration of a drafter, read from and written to the released `config.json` layout."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from dspark_jax.models.config import sizes, window_of
from dspark_jax.models.fields import flag, given, items, whole
from dspark_jax.models.rope import RopeConfig

HeadType = Literal["vanilla", "gated", "rnn"]
ARCHITECTURE = "Qwen3DSparkModel"


@dataclass(frozen=True)
class DrafterConfig:
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
    """Whether `extend` takes the target's final hidden states instead of taps."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}.")
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
        if not 0 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} must be within 0..{self.vocab_size}.")

    @property
    def output_bias(self) -> bool:
        return self.attention_bias

    @property
    def draft_rows(self) -> int:
        """Size of the vocabulary that drafts are drawn from."""
        return self.draft_vocab_size or self.vocab_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DrafterConfig":
        """Reads a released drafter's `config.json` (DeepSpec `Qwen3DSparkModel`).

        Raises:
          ValueError: another architecture, a sliding window, or a field that is absent or of another type.
        """
        architecture = (items(config, "architectures") or [None])[0]
        if architecture != ARCHITECTURE:
            raise ValueError(f"drafter architecture {architecture!r} is not supported; expected {ARCHITECTURE!r}.")
        needed = ("block_size", "target_layer_ids", "num_target_layers", "mask_token_id", "num_hidden_layers")
        needed += ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        if missing := [name for name in needed if config.get(name) is None]:
            raise ValueError(f"the drafter's config.json lacks {missing}.")
        if (act := config.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"the drafter's hidden_act {act!r} is not supported; expected 'silu'.")
        if window_of(config):
            raise ValueError(
                f"the drafter attends through a sliding window ({config['sliding_window']}), which is not supported; "
                "expected full_attention in every layer."
            )
        confidence = flag(config, "enable_confidence_head")
        return cls(
            **sizes(config),
            block_size=whole("block_size", config["block_size"]),
            tap_ids=tuple(whole("target_layer_ids", i, least=-1) for i in items(config, "target_layer_ids")),
            num_target_layers=whole("num_target_layers", config["num_target_layers"]),
            mask_token_id=whole("mask_token_id", config["mask_token_id"], least=None),
            rope=RopeConfig.from_hf(config),
            first_slot=whole("first_prediction_slot", config.get("first_prediction_slot", 0), least=None),
            markov_rank=whole("markov_rank", given(config, "markov_rank", 0), least=0),
            markov_head_type=given(config, "markov_head_type", "vanilla"),
            confidence_head=confidence,
            confidence_with_markov=confidence and flag(config, "confidence_head_with_markov"),
            draft_vocab_size=whole("draft_vocab_size", given(config, "draft_vocab_size", 0), least=0),
            num_anchors=whole("num_anchors", config.get("num_anchors", 512), least=0),
            attention_bias=flag(config, "attention_bias"),
            qk_norm=flag(config, "qk_norm", default=True),
            mlp_bias=flag(config, "mlp_bias"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The released `config.json`; the fields beyond it stand only where they differ from that layout."""
        extra: dict[str, Any] = {}
        if self.first_slot:
            extra["first_prediction_slot"] = self.first_slot
        if self.draft_vocab_size:
            extra["draft_vocab_size"] = self.draft_vocab_size
        if self.markov_rank:
            extra["markov_head_type"] = self.markov_head_type
        if self.confidence_head:
            extra["confidence_head_with_markov"] = self.confidence_with_markov
        if self.mlp_bias or not self.qk_norm:
            extra |= {"mlp_bias": self.mlp_bias, "qk_norm": self.qk_norm}
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "enable_confidence_head": self.confidence_head,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "layer_types": ["full_attention"] * self.num_layers,
            "markov_rank": self.markov_rank,
            "mask_token_id": self.mask_token_id,
            "max_position_embeddings": self.max_positions,
            "max_window_layers": self.num_layers,
            "num_anchors": self.num_anchors,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope.theta,
            "rope_parameters": self.rope.to_hf(),
            "sliding_window": None,
            "target_layer_ids": list(self.tap_ids),
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
            **extra,
        }
