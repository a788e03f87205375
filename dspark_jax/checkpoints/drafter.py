"""Drafters in the released layout (`deepseek-ai/dspark_*`): read strictly, written so that other engines load them."""

import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from dspark_jax.checkpoints.layout import Layout, Piece, Place, block_layout, check, fill, unfold
from dspark_jax.checkpoints.tensors import SafetensorsSource
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.models.decoder import Decoder, check_taps

FROZEN = ("embed_tokens.weight", "lm_head.weight")
"""The target's own tables, which released drafters repeat."""

DRAFT_IDS, IS_DRAFTED = "d2t", "t2d"
"""Reduced vocabulary in the EAGLE-3 convention: target id = row + d2t[row]; t2d marks the ids that have a row."""


def drafter_layout(c: DrafterConfig) -> Layout:
    """Layout of a released DSpark or DFlash drafter, without the frozen tables and the id map."""
    d, r = c.hidden_size, c.markov_rank
    layout = {
        "fc.weight": (Piece("fc.weight", (d, len(c.tap_ids) * d)),),
        "context_norm.scale": (Piece("hidden_norm.weight", (d,)),),
        "norm.scale": (Piece("norm.weight", (d,)),),
    }
    for i in range(c.num_layers):
        layout |= block_layout(f"layers.{i}", f"layers.{i}", c)
    if r:
        layout["markov.w1"] = (Piece("markov_head.markov_w1.weight", (c.vocab_size, r)),)
        layout["markov.w2"] = (Piece("markov_head.markov_w2.weight", (c.draft_rows, r)),)
        extra = {"gated": ("gate", r, d + r), "rnn": ("joint", 3 * r, 2 * r + d)}.get(c.markov_head_type)
        if extra:
            name, outputs, inputs = extra
            layout[f"markov.{name}.weight"] = (Piece(f"markov_head.{name}_proj.weight", (outputs, inputs)),)
            layout[f"markov.{name}.bias"] = (Piece(f"markov_head.{name}_proj.bias", (outputs,)),)
    if c.confidence_head:
        width = d + (r if c.confidence_with_markov else 0)
        layout["confidence.proj.weight"] = (Piece("confidence_head.proj.weight", (1, width)),)
        layout["confidence.proj.bias"] = (Piece("confidence_head.proj.bias", (1,)),)
    return layout


def read_drafter_config(directory: str | Path) -> DrafterConfig:
    """The config of a drafter directory.

    Raises:
      FileNotFoundError: there is no config.json; ValueError: it is not a supported drafter's.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; expected a drafter directory with config.json.")
    return DrafterConfig.from_hf(json.loads(path.read_text()))


def load_drafter(
    directory: str | Path, *, target: Decoder | None = None, dtype: Any = jnp.float32, place: Place | None = None
) -> DSpark:
    """Loads a drafter from a directory in the released layout.

    Args:
      target: checked against the drafter's copy of its embedding, if it has one.
      dtype: parameter dtype.
      place: puts arrays on devices.

    Raises:
      ValueError: a tensor missing, left over or misshapen, taps that the target cannot have, or a bad id map.
    """
    config = read_drafter_config(directory)
    check_taps(config.tap_ids, config.num_target_layers)
    source = SafetensorsSource(directory)
    layout = drafter_layout(config)
    extra = {*FROZEN} & source.names()
    if config.draft_vocab_size:
        extra |= {DRAFT_IDS, IS_DRAFTED} & source.names()
        if DRAFT_IDS not in source.names():
            raise ValueError(
                f"{directory}: draft_vocab_size is {config.draft_vocab_size} but {DRAFT_IDS!r} is missing."
            )
    check(layout, source, frozenset(extra))
    drafter = fill(lambda: DSpark(config, dtype=dtype, rngs=nnx.Rngs(0)), layout, source, dtype, place)
    if config.draft_vocab_size:
        ids = np.arange(config.draft_vocab_size) + source.read(DRAFT_IDS)
        if ids.shape != (config.draft_vocab_size,) or (np.diff(ids) <= 0).any() or ids.min() < 0:
            raise ValueError(f"{source.file(DRAFT_IDS)}: {DRAFT_IDS!r} must map rows to ascending target ids.")
        if ids.max() >= config.vocab_size:
            raise ValueError(f"{source.file(DRAFT_IDS)}: {DRAFT_IDS!r} maps to id {ids.max()} of {config.vocab_size}.")
        drafter.draft_ids[...] = jnp.asarray(ids, jnp.int32)
    if target is not None and FROZEN[0] in extra:
        _check_same_embedding(source, target)
    return drafter


def save_drafter(directory: str | Path, drafter: DSpark, *, target: Decoder | None = None, dtype: Any = None) -> Path:
    """Writes a drafter in the released layout: config.json and model.safetensors.

    The directory appears whole or not at all: files are written beside it and moved into place.

    Args:
      target: its embedding and head are written too, as engines that read released drafters expect; None leaves them
        out, and the file holds only what was trained.
      dtype: dtype on disk; None keeps the parameters' own.

    Raises:
      FileExistsError: the directory exists and holds something that is not a drafter.
    """
    directory = Path(directory)
    c = drafter.config
    if directory.exists() and any(directory.iterdir()) and not (directory / "config.json").is_file():
        raise FileExistsError(f"{directory} exists and holds no drafter; choose another directory.")
    tensors = {name: array.astype(dtype or array.dtype) for name, array in unfold(drafter, drafter_layout(c)).items()}
    if c.draft_vocab_size:
        ids = np.asarray(drafter.draft_ids[...], np.int64)
        tensors[DRAFT_IDS] = ids - np.arange(len(ids))
        tensors[IS_DRAFTED] = np.isin(np.arange(c.vocab_size), ids)
    if target is not None:
        tables = (target.embedding[...], target.head_weight)
        tensors |= {n: np.asarray(t).astype(dtype or t.dtype) for n, t in zip(FROZEN, tables, strict=True)}
    stored = str(np.dtype(dtype or drafter.dtype))
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps({**c.to_hf(), "dtype": stored, "torch_dtype": stored}, indent=1, sort_keys=True)
        (work / "config.json").write_text(text + "\n")
        directory.mkdir(exist_ok=True)
        for name in ("model.safetensors", "config.json"):
            os.replace(work / name, directory / name)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return directory


def _check_same_embedding(source: SafetensorsSource, target: Decoder) -> None:
    theirs = np.asarray(source.read(FROZEN[0])[:64], np.float32)
    ours = np.asarray(target.embedding[:64], np.float32)
    if theirs.shape[-1] == ours.shape[-1] and not np.allclose(theirs, ours, atol=1e-2):
        warnings.warn(
            f"{source.file(FROZEN[0])} repeats another target's embedding than the one loaded. Output stays exact, but "
            "few drafts will be accepted: check that this drafter was trained for this target.",
            stacklevel=3,
        )
