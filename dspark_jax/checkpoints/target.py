"""Targets from anywhere: a GGUF file, a Hugging Face directory, a hub id, or the embedded default."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.checkpoints.default import DEFAULT_TARGET, default_gguf
from dspark_jax.checkpoints.gguf_file import GGUFSource
from dspark_jax.checkpoints.hub import resolve
from dspark_jax.checkpoints.json_file import read_json
from dspark_jax.checkpoints.layout import Place, check, fill, target_layout
from dspark_jax.checkpoints.tensors import SafetensorsSource, TensorSource
from dspark_jax.models.config import TargetConfig, tied_flag, token_ids
from dspark_jax.models.decoder import Decoder
from dspark_jax.tokenizer import ChatTokenizer


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A target with its tokenizer (None if the checkpoint has none)."""

    model: Decoder
    tokenizer: ChatTokenizer | None
    source: str

    @property
    def config(self) -> TargetConfig:
        return self.model.config


def default_dtype() -> Any:
    """float32 on CPU, bfloat16 on accelerators."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def load_target(name: str | Path, *, dtype: Any = None, place: Place | None = None) -> LoadedTarget:
    """Loads a target.

    Args:
      name: `smollm2` (the embedded default), a .gguf file, a Hugging Face directory, or a hub id (`owner/name`).
      dtype: parameter dtype; None is `default_dtype()`.
      place: puts each array on devices.

    Raises:
      FileNotFoundError: nothing there; ValueError: the checkpoint is incomplete, corrupt or of an unsupported kind.
    """
    if str(name) == DEFAULT_TARGET:
        name = default_gguf()
    path = resolve(name)
    config, source, tokenizer = read_gguf(path) if path.suffix == ".gguf" else read_directory(path)
    layout = target_layout(config)
    check(layout, source)
    model = fill(lambda: Decoder(config, rngs=nnx.Rngs(0)), layout, source, dtype or default_dtype(), place)
    return LoadedTarget(model, tokenizer, str(path))


def load_tokenizer(name: str | Path) -> ChatTokenizer | None:
    """The tokenizer of a target that `load_target` would load, None if it has none, without its weights.

    Raises:
      FileNotFoundError: nothing there; ValueError: it is corrupt.
    """
    path = resolve(default_gguf() if str(name) == DEFAULT_TARGET else name)
    if path.suffix == ".gguf":
        return GGUFSource(path).tokenizer()
    return ChatTokenizer.from_directory(path) if (path / "tokenizer.json").is_file() else None


def load_target_config(name: str | Path) -> TargetConfig:
    """The config of a target that `load_target` would load, from its config.json alone.

    Without a tokenizer all rows of its table are taken for tokens.

    Raises:
      FileNotFoundError: nothing there; ValueError: the config is incomplete or of an unsupported kind.
    """
    path = resolve(default_gguf() if str(name) == DEFAULT_TARGET else name, files=("config.json",))
    if path.suffix == ".gguf":
        return GGUFSource(path).config()
    return TargetConfig.from_hf(read_json(path / "config.json" if path.is_dir() else path))


def read_gguf(path: Path) -> tuple[TargetConfig, TensorSource, ChatTokenizer]:
    """Config, tensors and tokenizer of a GGUF file; a turn also ends where its template ends one."""
    source = GGUFSource(path)
    tokenizer = source.tokenizer()
    config = source.config()
    stops = token_ids([*config.stop_ids, *tokenizer.eos_ids])
    return dataclasses.replace(config, stop_ids=stops), source, tokenizer


def read_directory(path: Path) -> tuple[TargetConfig, TensorSource, ChatTokenizer | None]:
    """Config, tensors and tokenizer of a Hugging Face directory.

    Stop ids are the union of config.json, generation_config.json and the tokenizer.

    Raises:
      FileNotFoundError: config.json or weights are missing.
      ValueError: the weights lack a head and the config does not tie it to the embedding.
    """
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} has no config.json; expected a Hugging Face model directory.")
    raw = read_json(path / "config.json")
    source = SafetensorsSource(path)
    has_head = "lm_head.weight" in source.names()
    if not has_head and not tied_flag(raw):
        raise ValueError(
            f"{path}: there is no lm_head.weight and tie_word_embeddings is not set, so there is no head. "
            "Set the flag if the head is the embedding, or fetch the missing tensor."
        )
    config = TargetConfig.from_hf(raw, tied=not has_head)
    tokenizer = ChatTokenizer.from_directory(path) if (path / "tokenizer.json").is_file() else None
    generation = path / "generation_config.json"
    more = read_json(generation).get("eos_token_id") if generation.is_file() else None
    stops = {*config.stop_ids, *token_ids(more, generation.name), *(tokenizer.eos_ids if tokenizer else ())}
    tokens = min(tokenizer.num_tokens, config.vocab_size) if tokenizer else config.vocab_size
    return dataclasses.replace(config, stop_ids=tuple(sorted(stops)), num_tokens=tokens), source, tokenizer
