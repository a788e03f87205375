"""`dspark inspect`: what a checkpoint is, without loading it onto a device."""

import dataclasses
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from dspark_jax.checkpoints.default import DEFAULT_TARGET, default_gguf
from dspark_jax.checkpoints.drafter import FROZEN, check_drafter, read_drafter_config
from dspark_jax.checkpoints.hub import resolve
from dspark_jax.checkpoints.json_file import read_json
from dspark_jax.checkpoints.layout import check, target_layout
from dspark_jax.checkpoints.target import read_directory, read_gguf
from dspark_jax.checkpoints.tensors import SafetensorsSource, TensorSource
from dspark_jax.drafters import DrafterConfig, Eagle3Config
from dspark_jax.drafters.kinds import CONFIGS, AnyDrafterConfig
from dspark_jax.models.fields import items


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Print what a checkpoint is.

    Attributes:
      path: a .gguf file, a directory, a hub id, or smollm2.
    """

    path: tyro.conf.Positional[str]

    def run(self) -> None:
        """Checks every tensor's name and shape, then prints the conventions that matter."""
        path = resolve(default_gguf() if self.path == DEFAULT_TARGET else self.path)
        rows = inspect_drafter(path) if is_drafter(path) else inspect_target(path)
        table = Table(title=str(path), show_header=False, title_justify="left")
        for name, value in rows.items():
            table.add_row(name, str(value))
        Console().print(table)


def is_drafter(path: Path) -> bool:
    """Whether a directory's config names the architecture of a drafter."""
    config = path / "config.json"
    return config.is_file() and not CONFIGS.keys().isdisjoint(items(read_json(config), "architectures"))


def inspect_target(path: Path) -> dict[str, Any]:
    """Facts of a target, once every tensor was found to fit."""
    config, source, tokenizer = read_gguf(path) if path.suffix == ".gguf" else read_directory(path)
    check(target_layout(config), source)
    return {
        "kind": f"target, {config.model_type}",
        "parameters": f"{_parameters(source):,}",
        "layers, hidden, MLP": f"{config.num_layers}, {config.hidden_size}, {config.intermediate_size}",
        "heads, kv heads, head dim": f"{config.num_heads}, {config.num_kv_heads}, {config.head_dim}",
        "vocabulary": f"{config.vocab_size} rows, {config.num_tokens} tokens",
        "head": "tied to the embedding" if config.tie_embeddings else "its own",
        "query/key norm": "yes" if config.qk_norm else "no",
        "RoPE": f"{config.rope.kind}, theta {config.rope.theta:g} {dict(config.rope.scaling) or ''}".strip(),
        "positions": config.max_positions,
        "stop ids": ", ".join(map(str, config.stop_ids)) or "none",
        "taps a drafter may use": f"-1 (embedding) to {config.num_layers - 2}",
        "chat template": "yes" if tokenizer and tokenizer.template else "no",
    }


def inspect_drafter(path: Path) -> dict[str, Any]:
    """Facts of a drafter, once every tensor was found to fit."""
    c = read_drafter_config(path)
    source = SafetensorsSource(path)
    extra = check_drafter(c, source)
    tables = "repeated in the file" if FROZEN[0] in extra else "taken from the target"
    facts: dict[str, Any] = {
        "kind": f"drafter, {_kind(c)}",
        "parameters": f"{_parameters(source, skip=extra):,} trained",
        "block size (gamma)": c.block_size,
    }
    if isinstance(c, DrafterConfig):
        facts["first prediction"] = "anchor slot (DSpark)" if c.first_slot == 0 else "first mask slot (DFlash)"
        facts["sequential head"] = f"{c.markov_head_type}, rank {c.markov_rank}" if c.markov_rank else "none"
        facts["mask token"] = c.mask_token_id
    if c.reads_final_hidden:
        facts["reads"] = f"final hidden state of a target of {c.num_target_layers} layers"
    else:
        facts["taps"] = f"outputs of target layers {list(c.tap_ids)} of {c.num_target_layers}"
    vocabulary = f"{c.draft_vocab_size} of {c.vocab_size}" if c.draft_vocab_size else f"all {c.vocab_size}"
    return facts | {
        "layers, hidden, MLP": f"{c.num_layers}, {c.hidden_size}, {c.intermediate_size}",
        "confidence head": _confidence(c),
        "draft vocabulary": vocabulary,
        "attention window": "none (full)",
        "embedding and head": tables,
        "RoPE": f"{c.rope.kind}, theta {c.rope.theta:g}",
    }


def _kind(c: AnyDrafterConfig) -> str:
    if isinstance(c, DrafterConfig):
        return "DSpark" if c.markov_rank else "DFlash"
    return "Eagle3" if isinstance(c, Eagle3Config) else "MTP"


def _confidence(c: AnyDrafterConfig) -> str:
    if not isinstance(c, DrafterConfig) or not c.confidence_head:
        return "none: every draft counts as certain, so policies that trim by confidence verify whole blocks"
    return "with Markov embedding" if c.confidence_with_markov else "hidden state only"


def _parameters(source: TensorSource, skip: set[str] | frozenset[str] = frozenset()) -> int:
    total = 0
    for name in source.names() - skip:
        size = 1
        for n in source.shape(name):
            size *= n
        total += size
    return total
