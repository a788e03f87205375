"""Configuration of a target model, read from a Hugging Face `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dspark_jax.models.fields import flag, given, items, number, section, whole
from dspark_jax.models.rope import RopeConfig


@dataclass(frozen=True)
class TargetConfig:
    """Shape of a Llama or Qwen3 decoder.

    Attributes:
      vocab_size: rows of the embedding table, padding included.
      num_tokens: rows that are real tokens; the rest are embedded but never sampled.
      tie_embeddings: the head is the embedding table.
      qk_norm: RMSNorm on every query and key head (Qwen3).
      attention_bias, output_bias, mlp_bias: whether q/k/v, o and MLP projections carry biases.
      stop_ids: token ids that end a generation; those that are no tokens of the model are left out.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    max_positions: int = 8192
    num_tokens: int = 0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}.")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}.")
        if not self.num_tokens:
            object.__setattr__(self, "num_tokens", self.vocab_size)
        if self.num_tokens > self.vocab_size:
            raise ValueError(f"the tokenizer has {self.num_tokens} tokens but the table only {self.vocab_size} rows.")
        object.__setattr__(self, "stop_ids", tuple(i for i in self.stop_ids if 0 <= i < self.num_tokens))

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, tied: bool | None = None) -> "TargetConfig":
        """Builds a config from a Hugging Face `config.json`.

        Args:
          config: the parsed file; multi-modal configs are read through their `text_config`.
          tied: whether the weights hold a head of their own; None trusts the flag in the file.

        Raises:
          ValueError: the architecture, activation, RoPE or attention window is not supported, or a field is absent or
            of another type.
        """
        text = {**config, **section(config, "text_config")}
        model_type = text.get("model_type")
        if model_type not in ("llama", "qwen3"):
            raise ValueError(f"model_type {model_type!r} is not supported; expected 'llama' or 'qwen3'.")
        if (act := text.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"hidden_act {act!r} is not supported; expected 'silu'.")
        if window_of(text):
            raise ValueError(
                f"sliding-window attention ({text['sliding_window']}) is not supported for targets; "
                "expected use_sliding_window false or full_attention layers."
            )
        needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [name for name in needed if text.get(name) is None]:
            raise ValueError(f"the target's config.json lacks {missing}.")
        return cls(
            model_type=model_type,
            **sizes(text),
            rope=RopeConfig.from_hf(text),
            tie_embeddings=tied_flag(config) if tied is None else tied,
            qk_norm=model_type == "qwen3",
            attention_bias=flag(text, "attention_bias"),
            output_bias=flag(text, "attention_bias"),
            mlp_bias=flag(text, "mlp_bias"),
            stop_ids=token_ids(text.get("eos_token_id")),
        )


def sizes(text: Mapping[str, Any]) -> dict[str, Any]:
    """What targets and drafters share of a `config.json`, under the names of our configs."""
    hidden, heads = (whole(name, text[name]) for name in ("hidden_size", "num_attention_heads"))
    return {
        "vocab_size": whole("vocab_size", text["vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": whole("intermediate_size", text["intermediate_size"]),
        "num_layers": whole("num_hidden_layers", text["num_hidden_layers"]),
        "num_heads": heads,
        "num_kv_heads": whole("num_key_value_heads", given(text, "num_key_value_heads", heads)),
        "head_dim": whole("head_dim", given(text, "head_dim", hidden // heads)),
        "rms_norm_eps": number("rms_norm_eps", text.get("rms_norm_eps", 1e-6)),
        "max_positions": whole("max_position_embeddings", text.get("max_position_embeddings", 8192)),
    }


def window_of(text: Mapping[str, Any]) -> bool:
    """Whether any layer of this config attends through a sliding window."""
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return False
    if text.get("layer_types") is None:
        return bool(text.get("use_sliding_window"))
    return "sliding_attention" in items(text, "layer_types")


def tied_flag(config: Mapping[str, Any]) -> bool:
    """`tie_word_embeddings`, which some configs keep only in `text_config` (and leave at its default outside)."""
    return any(flag(place, "tie_word_embeddings") for place in (config, section(config, "text_config")))


def token_ids(value: Any, place: str = "config.json") -> tuple[int, ...]:
    """Normalises an `eos_token_id`, which is an id, a list of ids or None, to a sorted tuple."""
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    return tuple(sorted({whole("eos_token_id", i, least=None, place=place) for i in ids}))
