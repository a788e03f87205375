"""How much a step computes, and how much a device could: their ratio over time is the model FLOPs utilisation."""

import math
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

PEAKS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L4": 121e12,
    "Tesla T4": 65e12,
}
"""Dense bf16 (T4: fp16) FLOP/s of a device by how JAX calls it, as its maker states them."""


def peak_flops(device: Any) -> float | None:
    """FLOP/s of a device at best, or None where they are not known."""
    name = device.device_kind
    if name in PEAKS:
        return PEAKS[name]
    # A GPU's name goes on with its memory and connector.
    return next((peak for known, peak in PEAKS.items() if name.startswith((f"{known} ", f"{known}-"))), None)


def matmul_flops(program: ClosedJaxpr | Jaxpr) -> int:
    """FLOPs of a program's matrix products on all devices together: what runs in a scan counts as often as it runs.

    Of branches the costliest counts, and a while loop counts once.
    """
    total = 0
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, out = _shape(equation.invars[0]), _shape(equation.outvars[0])
            total += 2 * math.prod(out) * math.prod(left[i] for i in contracted)
        inner = [
            matmul_flops(part) for part in jax.tree.leaves(equation.params, is_leaf=_is_program) if _is_program(part)
        ]
        combine = max if equation.primitive.name == "cond" else sum
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += times * combine(inner) if inner else 0
    return total


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _is_program(x: object) -> bool:
    return isinstance(x, ClosedJaxpr | Jaxpr)
