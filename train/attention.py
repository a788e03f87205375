"""Which implementation of attention a run's devices can take."""

from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from dspark_jax.models.config import TargetConfig
from dspark_jax.models.splash import MAX_ENDS, MAX_KEYS
from train.config import RunConfig
from train.packed_attention import Attention


def choose_attention(run: RunConfig, target: TargetConfig, dtype: Any, mesh: Mesh) -> Attention:
    """What `run.attention` comes to for a target of a dtype on a mesh's devices.

    Raises:
      ValueError: it names an implementation that cannot run there.
    """
    device, kv_heads, tensor = mesh.devices.flat[0], target.num_kv_heads, mesh.shape["tensor"]
    keys = run.seq_len + run.num_anchors * (run.block_size + 1)
    capability = getattr(device, "compute_capability", "")  # such as 9.0; AMD's are names
    heads = {f"a tensor axis that divides the {kv_heads} key heads": kv_heads % tensor == 0}
    needs: dict[Attention, dict[str, bool]] = {
        "splash": {
            "a TPU": device.platform == "tpu",
            f"seq_len below {MAX_ENDS}": run.seq_len < MAX_ENDS,
            f"at most {MAX_KEYS} keys in a row and its blocks together": keys <= MAX_KEYS,
            **heads,
        },
        "cudnn": {
            "an NVIDIA GPU of compute capability 8.0 or later": capability[:1].isdigit() and float(capability) >= 8,
            "a target in bfloat16 or float16": dtype in (jnp.bfloat16, jnp.float16),
            "a head_dim of at most 128 that 8 divides": target.head_dim <= 128 and target.head_dim % 8 == 0,
            **heads,
        },
        "plain": {},
    }
    if run.attention == "auto":
        return next(kind for kind, need in needs.items() if all(need.values()))
    if missing := [what for what, met in needs[run.attention].items() if not met]:
        raise ValueError(
            f"attention {run.attention} needs {', and '.join(missing)}; the mesh is {dict(mesh.shape)} of "
            f"{device.device_kind}. Choose auto or plain."
        )
    return run.attention
