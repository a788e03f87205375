"""GGUF targets: weights, tokenizer and chat template from one file."""

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from dspark_jax.models.config import TargetConfig, token_ids
from dspark_jax.models.fields import whole
from dspark_jax.models.rope import RopeConfig
from dspark_jax.tokenizer import ChatTokenizer

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FREQS = "rope_freqs.weight"
DIGITS = pre_tokenizers.Digits(individual_digits=True)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5


class GGUFSource:
    """The tensors of a GGUF file under Hugging Face names, dequantised on read.

    Raises:
      ValueError: not a GGUF file, a truncated one, an architecture other than llama and qwen3, or an unknown tensor.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self.reader = gguf.GGUFReader(self.path)
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise ValueError(f"{self.path} is not a whole GGUF file ({error}); fetch it again.") from error
        self.architecture = self.need("general.architecture")
        if self.architecture not in ("llama", "qwen3"):
            raise ValueError(
                f"{self.path}: architecture {self.architecture!r} is not supported; expected llama or qwen3."
            )
        self._tensors = {_hf_name(t.name, self.path): t for t in self.reader.tensors if t.name != ROPE_FREQS}

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value, or `default`."""
        found = self.reader.fields.get(key)
        return default if found is None else found.contents()

    def need(self, key: str) -> Any:
        """A metadata value that must be there.

        Raises:
          ValueError: it is not.
        """
        value = self.field(key)
        if value is None:
            raise ValueError(f"{self.path} lacks the metadata {key!r}; expected a file from llama.cpp's converter.")
        return value

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def file(self, name: str) -> str:
        return str(self.path)

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        try:
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(self.shape(name))
        except NotImplementedError as error:
            raise ValueError(f"{name!r} in {self.path}: {error}; use another quantisation of this model.") from error
        if self.architecture == "llama" and "q_proj" in name:
            return _uninterleave(array, self._heads[0])
        if self.architecture == "llama" and "k_proj" in name:
            return _uninterleave(array, self._heads[1])
        return array

    @property
    def _heads(self) -> tuple[int, int]:
        heads = self._size("attention.head_count")
        return heads, self._size("attention.head_count_kv", heads)

    def _size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1 from the architecture's metadata, which must be there without a default."""
        key = f"{self.architecture}.{key}"
        return whole(key, self.need(key) if default is None else self.field(key, default), place=str(self.path))

    @cached_property
    def _tokens(self) -> list[str]:
        """The vocabulary without the unused rows that pad the table at its end."""
        tokens, types = self.need("tokenizer.ggml.tokens"), self.need("tokenizer.ggml.token_type")
        used = [i for i, kind in enumerate(types) if kind != UNUSED]
        return tokens[: used[-1] + 1]

    def config(self) -> TargetConfig:
        """The target's config from the metadata."""
        a = self.architecture
        heads, kv_heads = self._heads
        hidden = self._size("embedding_length")
        head_dim = self._size("attention.key_length", hidden // heads)
        theta = self.field(f"{a}.rope.freq_base", 10000.0)
        kind = self.field(f"{a}.rope.scaling.type", "none")
        if ROPE_FREQS in {t.name for t in self.reader.tensors} or kind not in ("none", "linear", "yarn"):
            raise ValueError(f"{self.path}: RoPE scaling {kind!r} with rope_freqs is not supported; use safetensors.")
        if (rotated := self.field(f"{a}.rope.dimension_count", head_dim)) != head_dim:
            raise ValueError(f"{self.path} rotates {rotated} of {head_dim} dimensions a head; expected all of them.")
        scaling = {
            "factor": self.field(f"{a}.rope.scaling.factor"),
            "original_max_position_embeddings": self.field(f"{a}.rope.scaling.original_context_length"),
        }
        pairs = tuple((k, float(v)) for k, v in scaling.items() if v is not None) if kind != "none" else ()
        return TargetConfig(
            model_type=a,
            vocab_size=len(self.need("tokenizer.ggml.tokens")),
            hidden_size=hidden,
            intermediate_size=self._size("feed_forward_length"),
            num_layers=self._size("block_count"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            # The shortest decimal of a float32: 1e-05, as config.json has it.
            rms_norm_eps=float(str(np.float32(self.field(f"{a}.attention.layer_norm_rms_epsilon", 1e-6)))),
            rope=RopeConfig(theta=float(theta), kind="default" if kind == "none" else kind, scaling=pairs),
            tie_embeddings="lm_head.weight" not in self._tensors,
            qk_norm=a == "qwen3",
            attention_bias="model.layers.0.self_attn.q_proj.bias" in self._tensors,
            output_bias="model.layers.0.self_attn.o_proj.bias" in self._tensors,
            mlp_bias="model.layers.0.mlp.down_proj.bias" in self._tensors,
            max_positions=self._size("context_length", 8192),
            num_tokens=len(self._tokens),
            stop_ids=tuple(sorted({i for key in ("eos", "eot") for i in token_ids(self._special(key))})),
        )

    def tokenizer(self) -> ChatTokenizer:
        """The byte-level BPE tokenizer and chat template that the file carries.

        Raises:
          ValueError: another kind of tokenizer.
        """
        kind, pre = self.need("tokenizer.ggml.model"), self.field("tokenizer.ggml.pre")
        splits = {"smollm": [DIGITS, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]}
        splits["qwen2"] = [pre_tokenizers.Split(Regex(QWEN2), "isolated"), BYTES]
        if kind != "gpt2" or pre not in splits:
            raise ValueError(
                f"{self.path}: tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported; expected a byte-level "
                f"BPE (gpt2) of {sorted(splits)}. Use the Hugging Face directory of this model instead."
            )
        tokens, types = self._tokens, self.need("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ", 1)) for merge in self.need("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges, fuse_unk=False))
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits[pre])
        tokenizer.decoder = decoders.ByteLevel()
        added = [
            AddedToken(t, normalized=False, special=k == CONTROL)
            for t, k in zip(tokens, types, strict=False)
            if k in (CONTROL, USER_DEFINED)
        ]
        tokenizer.add_tokens(added)
        tokenizer.add_special_tokens([t for t in added if t.special])
        bos, eos = self._special("bos"), self._special("eos")
        return ChatTokenizer(
            tokenizer,
            template=self.field("tokenizer.chat_template"),
            bos_token=None if bos is None else tokens[bos],
            eos_token=None if eos is None else tokens[eos],
            add_bos=bool(self.field("tokenizer.ggml.add_bos_token", False)),
        )

    def _special(self, role: str) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        value = self.field(key)
        return None if value is None else whole(key, value, 0, len(self._tokens) - 1, place=str(self.path))


def _hf_name(name: str, path: Path) -> str:
    if name in NAMES:
        return NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if not match or match[2] not in LAYER_NAMES:
        raise ValueError(f"tensor {name!r} in {path} is not part of a Llama or Qwen3 decoder.")
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"


def _uninterleave(w: np.ndarray, heads: int) -> np.ndarray:
    """GGUF stores Llama q/k rows so that rotated pairs are neighbours; back to the half-split order."""
    h = w.shape[0] // heads
    return w.reshape(heads, h // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
