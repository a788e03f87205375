"""What the configs of all kinds of drafters share, and share in `config.json`."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dspark_jax.models.config import sizes, window_of
from dspark_jax.models.fields import flag, given, items, whole
from dspark_jax.models.rope import RopeConfig

NEEDED = (
    "num_target_layers",
    "num_hidden_layers",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
)


class ReleasedConfig:
    """Base of drafter configs, which are dataclasses with these fields."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: Any
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    tap_ids: tuple[int, ...]
    num_target_layers: int
    rms_norm_eps: float
    rope: RopeConfig
    draft_vocab_size: int
    attention_bias: bool
    max_positions: int
    qk_norm: bool
    mlp_bias: bool

    reads_final_hidden: ClassVar[bool]
    """Whether `extend` takes the target's final hidden states instead of taps."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}.")
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
    def read_shared(cls, config: Mapping[str, Any], needed: Sequence[str]) -> dict[str, Any]:
        """The shared fields of a `config.json`, all but block_size, under our names.

        Args:
          needed: fields it must have beside the shared ones.

        Raises:
          ValueError: another activation, a sliding window, or a field that is absent or of another type.
        """
        taps = () if cls.reads_final_hidden else ("target_layer_ids",)
        if missing := [name for name in (*needed, *taps, *NEEDED) if config.get(name) is None]:
            raise ValueError(f"the drafter's config.json lacks {missing}.")
        if (act := config.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"the drafter's hidden_act {act!r} is not supported; expected 'silu'.")
        if window_of(config):
            raise ValueError(
                f"the drafter attends through a sliding window ({config['sliding_window']}), which is not supported; "
                "expected full_attention in every layer."
            )
        return {
            **sizes(config),
            "num_target_layers": whole("num_target_layers", config["num_target_layers"]),
            "tap_ids": tuple(whole("target_layer_ids", i, least=-1) for i in items(config, "target_layer_ids")),
            "rope": RopeConfig.from_hf(config),
            "draft_vocab_size": whole("draft_vocab_size", given(config, "draft_vocab_size", 0), least=0),
            "attention_bias": flag(config, "attention_bias"),
            "qk_norm": flag(config, "qk_norm", default=True),
            "mlp_bias": flag(config, "mlp_bias"),
        }

    def write_shared(self, architecture: str) -> dict[str, Any]:
        """The shared part of a `config.json`; fields beyond the released ones stand only where they differ from it."""
        extra: dict[str, Any] = {} if self.reads_final_hidden else {"target_layer_ids": list(self.tap_ids)}
        if self.draft_vocab_size:
            extra["draft_vocab_size"] = self.draft_vocab_size
        if self.mlp_bias or not self.qk_norm:
            extra |= {"mlp_bias": self.mlp_bias, "qk_norm": self.qk_norm}
        return {
            "architectures": [architecture],
            "model_type": "qwen3",
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "layer_types": ["full_attention"] * self.num_layers,
            "max_position_embeddings": self.max_positions,
            "max_window_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope.theta,
            "rope_parameters": self.rope.to_hf(),
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
            **extra,
        }
