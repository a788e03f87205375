"""Meshes of (data, fsdp, tensor), and the one table that says how arrays lie on them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")
"""Axes that share a batch's rows."""

RULES: dict[str, P] = {
    "embedding": P("tensor", "fsdp"),
    "head.weight": P("tensor", "fsdp"),
    "qkv.weight": P("tensor", "fsdp"),
    "out.weight": P("fsdp", "tensor"),
    "gate_up.weight": P("tensor", "fsdp"),
    "down.weight": P("fsdp", "tensor"),
    "fc.weight": P("tensor", "fsdp"),
    "markov.w1": P("tensor", "fsdp"),
    "markov.w2": P("tensor", "fsdp"),
}
"""How parameters lie, by the end of their name; all others are whole on every device. Outputs of a layer are split over
`tensor` where heads or units are independent, inputs where their sums are added up; `fsdp` splits what is left."""


def make_mesh(shape: Sequence[int] = (-1, 1, 1), devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over all devices, or those given; one size may be -1 and takes what is left.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    known = math.prod(n for n in shape if n != -1)
    fits = len(shape) == len(AXES) and min(shape) >= -1 and 0 not in shape and len(devices) % known == 0
    free = sum(n == -1 for n in shape)
    if not fits or free > 1 or (not free and known != len(devices)):
        raise ValueError(
            f"mesh must be sizes of {', '.join(AXES)} whose product is the {len(devices)} devices, one of them -1 for "
            f"what is left; got {tuple(shape)}."
        )
    sizes = tuple(len(devices) // known if n == -1 else n for n in shape)
    grid = create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def spec_of(name: str, shape: Sequence[int], mesh: Mesh) -> P:
    """The spec of an array, by the end of its dotted name. An axis that does not divide its dimension is left out."""
    rule = next((rule for end, rule in RULES.items() if name == end or name.endswith(f".{end}")), P())
    if len(rule) != len(shape):
        return P()
    return P(*(axis if axis and n % mesh.shape[axis] == 0 else None for axis, n in zip(rule, shape, strict=True)))


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Shardings of a tree of arrays or shapes. State that an optimizer keeps of a parameter lies as the parameter."""

    def of(path, leaf) -> NamedSharding:
        return NamedSharding(mesh, spec_of(dotted(path), leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(of, tree)


def laid_out(tree: Any, lie: Any) -> Any:
    """The shapes of a tree of arrays or shapes, with their shardings: what a program that is only compiled is given."""
    return jax.tree.map(lambda x, lie: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lie), tree, lie)


def placer(mesh: Mesh) -> Callable[[str, np.ndarray], jax.Array]:
    """Puts arrays, by name, on a mesh; every process needs the whole array and keeps its part."""
    return lambda name, array: spread(array, NamedSharding(mesh, spec_of(name, array.shape, mesh)))


def spread(x: jax.Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
    """An array, whole in every process or on the mesh already, as `sharding` says; what lies so is not copied."""
    if isinstance(x, jax.Array) and (x.sharding.is_equivalent_to(sharding, x.ndim) or not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def constrain(x: jax.Array, *axes: Any) -> jax.Array:
    """Asks for a layout inside a program; without a mesh it asks for nothing."""
    return x if jax.sharding.get_abstract_mesh().empty else jax.lax.with_sharding_constraint(x, P(*axes))


def by_rows(x: jax.Array, *axes: Any) -> jax.Array:
    """Splits an array along its first axis, over everything that shares rows, and along the next over `axes`."""
    return constrain(x, ROWS, *axes, *(None,) * (jnp.ndim(x) - 1 - len(axes)))


def by_rows_and_heads(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """An attention kernel, run by each device on its own rows and heads.

    It takes q [b, q, n, h], k and v [b, s, k, h] and a tree of [b, ...], and returns [b, q, n, h].
    """
    if jax.sharding.get_abstract_mesh().empty:
        return kernel
    heads = P(ROWS, None, "tensor")
    # Kernels do not say over which axes their results vary.
    return jax.shard_map(kernel, in_specs=(heads, heads, heads, P(ROWS)), out_specs=heads, check_vma=False)


def tensor_shards() -> int:
    """Devices that share heads and vocabulary on the mesh in use; 1 without a mesh."""
    return dict(jax.sharding.get_abstract_mesh().shape).get("tensor", 1)


def row_shards(mesh: Mesh | None = None) -> int:
    """Devices that share the rows of a batch, on the mesh in use where none is given; 1 without a mesh."""
    shape = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).shape
    return math.prod(shape.get(axis, 1) for axis in ROWS)


def dotted(path: Sequence[Any]) -> str:
    """The name of a leaf, without what flax wraps around its value."""
    names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    return ".".join(name for name in names if name not in ("value", "raw_value"))
