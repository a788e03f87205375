"""Chips as their makers state them, and slices of TPUs that need not be there."""

import dataclasses
import os
from typing import Any

import jax

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


@dataclasses.dataclass(frozen=True)
class Chip:
    """What its maker states of a chip: peak bf16 FLOP/s, bytes/s of HBM and of all links to other chips, HBM bytes.

    `accelerator` is what libtpu takes for TPU_ACCELERATOR_TYPE.
    """

    flops: float
    bandwidth: float
    links: float
    memory: float
    accelerator: str


GIB = 1 << 30
CHIPS = {
    "v4": Chip(PEAKS["TPU v4"], 1.228e12, 300e9, 32 * GIB, "v4-8"),
    "v5e": Chip(PEAKS["TPU v5e"], 0.819e12, 200e9, 16 * GIB, "v5litepod-16"),
    "v5p": Chip(PEAKS["TPU v5p"], 2.765e12, 600e9, 95 * GIB, "v5p-8"),
    "v6e": Chip(PEAKS["TPU v6e"], 1.64e12, 448e9, 32 * GIB, "v6e-16"),
}


def peak_bytes(memory: Any) -> int:
    """What a compiled program holds of a device at most, by its `memory_analysis()`."""
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes


def topology(name: str) -> list[Any]:
    """Devices of a TPU slice that need not be there, such as v5e:4x4.

    Raises:
      ValueError: the chip is not known, or libtpu is missing or knows no such slice.
    """
    if (chip := name.split(":")[0]) not in CHIPS:
        raise ValueError(f"--topology must be a slice of {', '.join(CHIPS)}, such as v5e:4x4; got {name!r}.")
    # Set before libtpu starts: there is no TPU here to ask, and none may be looked for.
    apart = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    os.environ.update({**apart, "TPU_ACCELERATOR_TYPE": CHIPS[chip].accelerator, **os.environ})
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(name, platform="tpu").devices)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"no TPU slice {name!r} ({error}). pip install 'jax[tpu]', and name a slice such as v5e:4x4."
        ) from error
