"""Floating-point operations: how many a training step asks for, from its shapes alone, and how many a device can do."""

from typing import Any

from dspark_jax.drafters import DrafterConfig, Eagle3Config
from dspark_jax.models.config import TargetConfig
from train.config import RunConfig

TRAINED, FROZEN = 3, 2
"""What forward and backward pass cost in forward passes: a frozen operand has no gradient to compute."""


def model_flops(run: RunConfig, target: TargetConfig) -> dict[str, float]:
    """Operations of one step on all devices together, by part: two for each pair multiplied and added.

    Products of matrices alone count. Attention counts all pairs of queries and keys, masked ones too. What memory
    options compute again counts once.
    """
    drafter = run.drafter(target)
    d, g, r, taps = target.hidden_size, run.block_size, run.markov_rank, len(drafter.tap_ids)
    tokens, blocks = run.batch_size * run.seq_len, run.batch_size * run.num_anchors
    scored, rows = tokens if run.share_targets else blocks * g, drafter.draft_rows
    heads = target.num_heads * target.head_dim
    keys = 2 * drafter.num_kv_heads * drafter.head_dim
    target_layer = d * (2 * heads + keys) + 3 * d * target.intermediate_size
    products = {  # by part, of matrices with how many rows, in forward passes
        "target": target.num_layers * tokens * target_layer,
        "target attention": 2 * target.num_layers * tokens * run.seq_len * heads,
        "target head": scored * d * (rows if run.reads_features else target.vocab_size),
        "draft head": FROZEN * blocks * g * d * rows,
    }
    if run.reads_features:
        products["target"] = products["target attention"] = 0
    mlp = 3 * d * drafter.intermediate_size
    if isinstance(drafter, DrafterConfig):
        slots = g + drafter.first_slot
        inner = {"vanilla": 0, "gated": (d + r) * r, "rnn": (2 * r + d) * 3 * r}[drafter.markov_head_type]
        fused = FROZEN * tokens * taps * d * d
        context = TRAINED * drafter.num_layers * tokens * d * keys
        layers = drafter.num_layers * blocks * slots * (d * (2 * heads + keys) + mlp)
        pairs = drafter.num_layers * blocks * slots * (run.seq_len + slots)
        products["sequential head"] = TRAINED * blocks * g * (r * rows + inner)
    else:
        eagle = isinstance(drafter, Eagle3Config)
        wide = 2 * d if eagle else d
        fused = FROZEN * tokens * taps * d * d if eagle else TRAINED * (tokens + blocks * g) * 2 * d * d
        context = TRAINED * tokens * wide * keys
        layers = blocks * g * (wide * (heads + keys) + heads * d + mlp)
        pairs = sum(blocks * (run.seq_len + step + 1) for step in range(g))
    products |= {
        "drafter's context": fused + context,
        "draft layers": TRAINED * layers,
        "draft attention": TRAINED * 2 * pairs * heads,
    }
    return {part: 2.0 * n for part, n in products.items()}


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
