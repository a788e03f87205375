"""Which tensors of a checkpoint fill which parameter, said once for reading and writing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.checkpoints.tensors import TensorSource
from dspark_jax.models.config import TargetConfig

M = TypeVar("M", bound=nnx.Module)

IGNORED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Piece:
    """One tensor of a checkpoint; a parameter is its pieces stacked along the first axis."""

    name: str
    shape: tuple[int, ...]


Layout = Mapping[str, tuple[Piece, ...]]
"""Parameter path (dotted) -> pieces."""

Place = Callable[[str, np.ndarray], jax.Array]
"""Puts a host array on devices; gets the parameter path."""


def block_layout(module: str, tensors: str, c, inputs: int | None = None) -> dict[str, tuple[Piece, ...]]:
    """Layout of one transformer layer, shared by targets and drafters.

    Args:
      module: parameter path of the layer; tensors: prefix of its tensors; c: a config with the shapes; inputs: width
        that attention reads, the hidden size where None.
    """
    d, f, h, n, k = c.hidden_size, c.intermediate_size, c.head_dim, c.num_heads, c.num_kv_heads
    attn, mlp = f"{tensors}.self_attn", f"{tensors}.mlp"
    rows = {"q": n * h, "k": k * h, "v": k * h}
    layout = {
        f"{module}.attention_norm.scale": (Piece(f"{tensors}.input_layernorm.weight", (d,)),),
        f"{module}.mlp_norm.scale": (Piece(f"{tensors}.post_attention_layernorm.weight", (d,)),),
        f"{module}.attention.qkv.weight": tuple(
            Piece(f"{attn}.{p}_proj.weight", (r, inputs or d)) for p, r in rows.items()
        ),
        f"{module}.attention.out.weight": (Piece(f"{attn}.o_proj.weight", (d, n * h)),),
        f"{module}.mlp.gate_up.weight": tuple(Piece(f"{mlp}.{p}_proj.weight", (f, d)) for p in ("gate", "up")),
        f"{module}.mlp.down.weight": (Piece(f"{mlp}.down_proj.weight", (d, f)),),
    }
    if c.qk_norm:
        for p in ("q", "k"):
            layout[f"{module}.attention.{p}_norm.scale"] = (Piece(f"{attn}.{p}_norm.weight", (h,)),)
    if c.attention_bias:
        layout[f"{module}.attention.qkv.bias"] = tuple(Piece(f"{attn}.{p}_proj.bias", (r,)) for p, r in rows.items())
    if c.output_bias:
        layout[f"{module}.attention.out.bias"] = (Piece(f"{attn}.o_proj.bias", (d,)),)
    if c.mlp_bias:
        layout[f"{module}.mlp.gate_up.bias"] = tuple(Piece(f"{mlp}.{p}_proj.bias", (f,)) for p in ("gate", "up"))
        layout[f"{module}.mlp.down.bias"] = (Piece(f"{mlp}.down_proj.bias", (d,)),)
    return layout


def target_layout(c: TargetConfig) -> Layout:
    """Layout of a Hugging Face Llama or Qwen3 checkpoint."""
    layout = {
        "embedding": (Piece("model.embed_tokens.weight", (c.vocab_size, c.hidden_size)),),
        "norm.scale": (Piece("model.norm.weight", (c.hidden_size,)),),
    }
    if not c.tie_embeddings:
        layout["head.weight"] = (Piece("lm_head.weight", (c.vocab_size, c.hidden_size)),)
    for i in range(c.num_layers):
        layout |= block_layout(f"layers.{i}", f"model.layers.{i}", c)
    return layout


def check(layout: Layout, source: TensorSource, extra: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """Checks that every tensor is used exactly once and has the expected shape.

    Args:
      extra: shapes of the tensors that the caller reads itself.

    Raises:
      ValueError: names each missing, unexpected or misshapen tensor with its file and both shapes.
    """
    have = {name for name in source.names() if not name.endswith(IGNORED)}
    wanted = {piece.name: piece.shape for pieces in layout.values() for piece in pieces} | dict(extra or {})
    files = sorted({source.file(name) for name in source.names()})
    place = (files[0] if len(files) == 1 else Path(files[0]).parent) if files else "the checkpoint"
    problems = [f"missing {name!r} (expected shape {wanted[name]}) in {place}" for name in sorted(wanted.keys() - have)]
    problems += [
        f"unexpected {name!r} of shape {source.shape(name)} in {source.file(name)}"
        for name in sorted(have - wanted.keys())
    ]
    problems += [
        f"{name!r} in {source.file(name)} has shape {source.shape(name)}, expected {wanted[name]}"
        for name in sorted(wanted.keys() & have)
        if source.shape(name) != wanted[name]
    ]
    if problems:
        more = f"\n  ... and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(
            "the checkpoint does not fit its config:\n  "
            + "\n  ".join(problems[:8])
            + more
            + "\nCheck that config.json belongs to these weights."
        )


def fill(
    build: Callable[[], M],
    layout: Layout,
    source: TensorSource,
    dtype,
    place: Place | None,
    others: Mapping[str, np.ndarray] | None = None,
) -> M:
    """Builds a module and fills every parameter from `source`, which must have passed `check`.

    Args:
      build: makes the module; only its shapes are used.
      dtype: parameter dtype.
      place: puts each array on devices; None means the default device.
      others: arrays of the variables that are no parameters.

    Raises:
      ValueError: a tensor does not hold floats, or holds NaN or infinite ones.
    """
    graph, state = nnx.split(nnx.eval_shape(build))
    flat = dict(nnx.to_flat_state(state))
    paths = {".".join(map(str, path)): path for path in flat}
    others = others or {}
    assert paths.keys() == {*layout, *others}, paths.keys() ^ {*layout, *others}

    def put(name: str, array: np.ndarray) -> None:
        variable = flat[paths[name]]
        assert array.shape == variable.shape, (name, array.shape, variable.shape)
        flat[paths[name]] = variable.replace(place(name, array) if place else jnp.asarray(array))

    for name, array in others.items():
        put(name, array)
    for name, pieces in layout.items():
        parts = [np.asarray(source.read(piece.name)) for piece in pieces]
        for piece, part in zip(pieces, parts, strict=True):
            if not jnp.issubdtype(part.dtype, jnp.floating):
                raise ValueError(
                    f"{piece.name!r} in {source.file(piece.name)} is {part.dtype}, expected floats; quantised "
                    "safetensors are not supported."
                )
            if not _finite(part):
                raise ValueError(
                    f"{piece.name!r} in {source.file(piece.name)} holds NaN or infinite values; fetch it again."
                )
        put(name, (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(jnp.dtype(dtype)))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _finite(x: np.ndarray) -> bool:
    if x.dtype == jnp.bfloat16:
        # By its bits: np.isfinite would add a fifth to the time of loading bfloat16.
        return bool(((x.view(np.uint16) & 0x7FFF) < 0x7F80).all())
    return bool(np.isfinite(x).all())


def unfold(module: nnx.Module, layout: Layout) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint from a module: the inverse of `fill`."""
    flat = {".".join(map(str, path)): var for path, var in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    tensors = {}
    for name, pieces in layout.items():
        array = np.asarray(flat[name][...])
        start = 0
        for piece in pieces:
            tensors[piece.name] = np.ascontiguousarray(array[start : start + piece.shape[0]])
            start += piece.shape[0]
        assert start == array.shape[0], name
    return tensors
