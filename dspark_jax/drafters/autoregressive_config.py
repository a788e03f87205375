"""Configuration of the drafters that draft token by token, Eagle3 and MTP, read from and written to `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from dspark_jax.models.config import sizes, window_of
from dspark_jax.models.fields import flag, given, items, number, whole
from dspark_jax.models.rope import RopeConfig


@dataclass(frozen=True)
class AutoregressiveConfig:
    """Shape and conventions that Eagle3 and MTP share.

    Attributes:
      block_size: draft tokens a round: the horizon of training-time test (`ttt_length`).
      num_target_layers: depth of the target it was trained for.
      tap_ids: target layers whose outputs it reads; none for MTP.
      step_decay: weight of every training step relative to the one before (kept for the record).
      draft_vocab_size: rows of the reduced draft vocabulary; 0 drafts from the target's whole vocabulary.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_target_layers: int
    tap_ids: tuple[int, ...] = ()
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    step_decay: float = 0.8
    draft_vocab_size: int = 0
    attention_bias: bool = False
    max_positions: int = 8192
    qk_norm: bool = True
    mlp_bias: bool = False

    ARCHITECTURE: ClassVar[str]
    num_layers: ClassVar[int] = 1
    """With one layer, keys of a context are projections of what is known of each token; with more they would be states
    of a pass over all of it, which a rejection would make wrong."""
    reads_final_hidden: ClassVar[bool]
    """Whether `extend` takes the target's final hidden states instead of taps."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}.")
        if self.step_decay <= 0:
            raise ValueError(f"step_decay must be above 0, got {self.step_decay}.")
        if not 0 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} must be within 0..{self.vocab_size}.")
        if self.reads_final_hidden and self.tap_ids:
            raise ValueError(
                f"{type(self).__name__} reads the final hidden state; expected no taps, got {self.tap_ids}."
            )

    @property
    def output_bias(self) -> bool:
        return self.attention_bias

    @property
    def draft_rows(self) -> int:
        """Size of the vocabulary that drafts are drawn from."""
        return self.draft_vocab_size or self.vocab_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a drafter's `config.json` (for Eagle3 that of DeepSpec's `Qwen3Eagle3Model`).

        Raises:
          ValueError: more than one layer, a sliding window, or a field that is absent or of another type.
        """
        needed = ("ttt_length", "num_target_layers", "num_hidden_layers", "vocab_size", "hidden_size")
        needed += (
            "intermediate_size",
            "num_attention_heads",
            *(() if cls.reads_final_hidden else ("target_layer_ids",)),
        )
        if missing := [name for name in needed if config.get(name) is None]:
            raise ValueError(f"the drafter's config.json lacks {missing}.")
        if (act := config.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"the drafter's hidden_act {act!r} is not supported; expected 'silu'.")
        if window_of(config):
            raise ValueError(
                f"the drafter attends through a sliding window ({config['sliding_window']}), which is not supported; "
                "expected full_attention."
            )
        shape = sizes(config)
        layers = {shape.pop("num_layers"), given(config, "draft_num_hidden_layers", 1)}
        if layers != {1}:
            raise ValueError(
                f"the drafter has {max(layers)} layers; expected num_hidden_layers 1, the only depth whose context can "
                "be written token by token."
            )
        return cls(
            **shape,
            block_size=whole("ttt_length", config["ttt_length"]),
            num_target_layers=whole("num_target_layers", config["num_target_layers"]),
            tap_ids=tuple(whole("target_layer_ids", i, least=-1) for i in items(config, "target_layer_ids")),
            rope=RopeConfig.from_hf(config),
            step_decay=number("step_loss_decay", given(config, "step_loss_decay", 0.8)),
            draft_vocab_size=whole("draft_vocab_size", given(config, "draft_vocab_size", 0), least=0),
            attention_bias=flag(config, "attention_bias"),
            qk_norm=flag(config, "qk_norm", default=True),
            mlp_bias=flag(config, "mlp_bias"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json`; the fields beyond the released ones stand only where they differ from that layout."""
        extra: dict[str, Any] = {} if self.reads_final_hidden else {"target_layer_ids": list(self.tap_ids)}
        if self.draft_vocab_size:
            extra["draft_vocab_size"] = self.draft_vocab_size
        if self.mlp_bias or not self.qk_norm:
            extra |= {"mlp_bias": self.mlp_bias, "qk_norm": self.qk_norm}
        return {
            "architectures": [self.ARCHITECTURE],
            "model_type": "qwen3",
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "draft_num_hidden_layers": 1,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "layer_types": ["full_attention"],
            "max_position_embeddings": self.max_positions,
            "max_window_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": 1,
            "num_key_value_heads": self.num_kv_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope.theta,
            "rope_parameters": self.rope.to_hf(),
            "sliding_window": None,
            "step_loss_decay": self.step_decay,
            "tie_word_embeddings": False,
            "ttt_length": self.block_size,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
            **extra,
        }


@dataclass(frozen=True)
class Eagle3Config(AutoregressiveConfig):
    """An Eagle3 drafter (arXiv 2503.01840), in DeepSpec's released layout."""

    ARCHITECTURE: ClassVar[str] = "Qwen3Eagle3Model"
    reads_final_hidden: ClassVar[bool] = False


@dataclass(frozen=True)
class MTPConfig(AutoregressiveConfig):
    """An MTP module (DeepSeek-V3, arXiv 2412.19437, section 2.2) as a drafter of its own.

    block_size 1 is MTP-1; see `MTP.repeated` for its static use with more drafts.
    """

    ARCHITECTURE: ClassVar[str] = "Qwen3MTPModel"
    reads_final_hidden: ClassVar[bool] = True
