"""Drafters in the released layouts (`deepseek-ai/dspark_*`, `eagle3_*`): read strictly, written for other engines."""

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
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dspark_jax.checkpoints.drafter_layouts import drafter_layout
from dspark_jax.checkpoints.json_file import read_json
from dspark_jax.checkpoints.layout import Place, check, fill, unfold
from dspark_jax.checkpoints.tensors import SafetensorsSource
from dspark_jax.drafters.kinds import CONFIGS, AnyDrafter, AnyDrafterConfig, build_drafter
from dspark_jax.models.decoder import Decoder, check_taps
from dspark_jax.models.fields import items

FROZEN = ("embed_tokens.weight", "lm_head.weight")
"""The target's own tables, which released drafters repeat."""

DRAFT_IDS, IS_DRAFTED = "d2t", "t2d"
"""Reduced vocabulary in the EAGLE-3 convention: target id = row + d2t[row]; t2d marks the ids that have a row."""


def read_drafter_config(directory: str | Path) -> AnyDrafterConfig:
    """The config of a drafter directory.

    Raises:
      FileNotFoundError: there is no config.json; ValueError: it is not a supported drafter's.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; expected a drafter directory with config.json.")
    config = read_json(path)
    architecture = (items(config, "architectures") or [None])[0]
    if architecture not in CONFIGS:
        raise ValueError(
            f"{path}: drafter architecture {architecture!r} is not supported; expected one of {sorted(CONFIGS)}."
        )
    return CONFIGS[architecture].from_hf(config)


def check_drafter(config: AnyDrafterConfig, source: SafetensorsSource) -> set[str]:
    """Checks taps and every tensor of a drafter; returns the names of those beside its layout.

    These are the target's tables (both or neither) and the id map of a reduced vocabulary.

    Raises:
      ValueError: taps that the target cannot have, or a tensor missing, left over or misshapen.
    """
    if not config.reads_final_hidden:
        check_taps(config.tap_ids, config.num_target_layers)
    extra: dict[str, tuple[int, ...]] = {}
    if not source.names().isdisjoint(FROZEN):
        extra |= dict.fromkeys(FROZEN, (config.vocab_size, config.hidden_size))
    if config.draft_vocab_size:
        extra[DRAFT_IDS] = (config.draft_vocab_size,)
        if IS_DRAFTED in source.names():
            extra[IS_DRAFTED] = (config.vocab_size,)
    check(drafter_layout(config), source, extra)
    return set(extra)


def load_drafter(
    directory: str | Path, *, target: Decoder | None = None, dtype: Any = jnp.float32, place: Place | None = None
) -> AnyDrafter:
    """Loads a drafter, of the kind its config names, from a directory in the released layout.

    Args:
      target: checked against the drafter's copy of its embedding, if it has one.
      dtype: parameter dtype.
      place: puts arrays on devices.

    Raises:
      ValueError: a tensor missing, left over or misshapen, taps that the target cannot have, or a bad id map.
    """
    config = read_drafter_config(directory)
    source = SafetensorsSource(directory)
    extra = check_drafter(config, source)
    layout = drafter_layout(config)
    ids = {"draft_ids": _read_draft_ids(config, source)} if config.draft_vocab_size else {}
    drafter = fill(lambda: build_drafter(config, dtype=dtype, rngs=nnx.Rngs(0)), layout, source, dtype, place, ids)
    if target is not None and FROZEN[0] in extra:
        _check_same_embedding(source, target)
    return drafter


def _read_draft_ids(config: AnyDrafterConfig, source: SafetensorsSource) -> np.ndarray:
    offsets = source.read(DRAFT_IDS)
    ids = np.arange(config.draft_vocab_size) + offsets
    where = f"{source.file(DRAFT_IDS)}: {DRAFT_IDS!r}"
    if not np.issubdtype(offsets.dtype, np.integer) or (np.diff(ids) <= 0).any() or ids[0] < 0:
        raise ValueError(f"{where} must map rows to ascending target ids.")
    if ids[-1] >= config.vocab_size:
        raise ValueError(f"{where} maps to id {ids[-1]}, expected ids below {config.vocab_size}.")
    if IS_DRAFTED in source.names():
        marked = np.flatnonzero(source.read(IS_DRAFTED))
        if not np.array_equal(marked, ids):
            raise ValueError(f"{where} and {IS_DRAFTED!r} disagree about which ids are drafted.")
    return ids.astype(np.int32)


def save_drafter(
    directory: str | Path, drafter: AnyDrafter, *, target: Decoder | None = None, dtype: Any = None
) -> Path:
    """Writes a drafter in the released layout: config.json and model.safetensors.

    The directory appears whole or not at all: it is written beside its place and moved there. Other files of a drafter
    that is overwritten stay.

    Args:
      target: its embedding and head are written too, as engines that read released drafters expect; None leaves them
        out, and the file holds only what was trained.
      dtype: dtype on disk; None keeps the parameters' own.

    Raises:
      FileExistsError: the directory exists and holds something that is not a drafter.
      OSError: it cannot be written, as on a full disk.
    """
    directory = Path(directory)
    c = drafter.config
    if directory.exists() and any(directory.iterdir()) and not (directory / "config.json").is_file():
        raise FileExistsError(f"{directory} exists and holds no drafter; choose another directory.")
    tensors = {name: array.astype(dtype or array.dtype) for name, array in unfold(drafter, drafter_layout(c)).items()}
    if drafter.draft_ids is not None:
        ids = np.asarray(drafter.draft_ids[...], np.int64)
        tensors[DRAFT_IDS] = ids - np.arange(len(ids))
        tensors[IS_DRAFTED] = np.isin(np.arange(c.vocab_size), ids)
    if target is not None:
        tables = (target.embedding[...], target.head_weight)
        tensors |= {n: np.asarray(t).astype(dtype or t.dtype) for n, t in zip(FROZEN, tables, strict=True)}
    stored = str(np.dtype(dtype or drafter.dtype))
    home = directory.resolve()
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{home.name}.", dir=home.parent, ignore_cleanup_errors=True) as work:
        new, old = Path(work) / "new", Path(work) / "old"
        new.mkdir()
        if home.is_dir():
            stale = shutil.ignore_patterns("config.json", "model*.safetensors", "*.safetensors.index.json")
            shutil.copytree(home, new, ignore=stale, dirs_exist_ok=True)
        try:
            save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{directory} could not be written ({error}); what was there is unchanged.") from error
        text = json.dumps({**c.to_hf(), "dtype": stored, "torch_dtype": stored}, indent=1, sort_keys=True)
        (new / "config.json").write_text(text + "\n")
        # safetensors makes its files unreadable for others, whatever the umask.
        (new / "model.safetensors").chmod((new / "config.json").stat().st_mode)
        _swap(new, home, old)
    return directory


def _swap(new: Path, home: Path, old: Path) -> None:
    """Moves `new` to `home`, and what was there to `old`."""
    replaced = home.exists()
    if replaced:
        os.rename(home, old)
    try:
        os.rename(new, home)
    except BaseException:
        if replaced:
            os.rename(old, home)
        raise


def _check_same_embedding(source: SafetensorsSource, target: Decoder) -> None:
    theirs = np.asarray(source.first_rows(FROZEN[0], 64), np.float32)
    ours = np.asarray(target.embedding[:64], np.float32)
    if theirs.shape[-1] == ours.shape[-1] and not np.allclose(theirs, ours, atol=1e-2):
        warnings.warn(
            f"{source.file(FROZEN[0])} repeats another target's embedding than the one loaded. Output stays exact, but "
            "few drafts will be accepted: check that this drafter was trained for this target.",
            stacklevel=3,
        )
