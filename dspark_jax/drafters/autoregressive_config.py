"""Configuration of the drafters that draft token by token, Eagle3 and MTP, read from and written to `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from dspark_jax.drafters.released_config import ReleasedConfig
from dspark_jax.models.fields import given, number, whole
from dspark_jax.models.rope import RopeConfig


@dataclass(frozen=True)
class AutoregressiveConfig(ReleasedConfig):
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_decay <= 0:
            raise ValueError(f"step_decay must be above 0, got {self.step_decay}.")
        if self.reads_final_hidden and self.tap_ids:
            raise ValueError(
                f"{type(self).__name__} reads the final hidden state; expected no taps, got {self.tap_ids}."
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a drafter's `config.json` (for Eagle3 that of DeepSpec's `Qwen3Eagle3Model`).

        Raises:
          ValueError: more than one layer, a sliding window, or a field that is absent or of another type.
        """
        shared = cls.read_shared(config, ("ttt_length",))
        layers = {shared.pop("num_layers"), given(config, "draft_num_hidden_layers", 1)}
        if layers != {1}:
            raise ValueError(
                f"the drafter has {max(layers)} layers; expected num_hidden_layers 1, the only depth whose context can "
                "be written token by token."
            )
        return cls(
            **shared,
            block_size=whole("ttt_length", config["ttt_length"]),
            step_decay=number("step_loss_decay", given(config, "step_loss_decay", 0.8)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json`; the fields beyond the released ones stand only where they differ from that layout."""
        return {
            **self.write_shared(self.ARCHITECTURE),
            "draft_num_hidden_layers": 1,
            "step_loss_decay": self.step_decay,
            "ttt_length": self.block_size,
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
