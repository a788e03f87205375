"""Floating-point operations: how many a training step asks for, from its shapes alone, and how many a device can do."""

import math
from collections.abc import Sequence

from dspark_jax.drafters import DrafterConfig, Eagle3Config
from dspark_jax.hlo import Array
from dspark_jax.models.config import TargetConfig
from dspark_jax.models.splash import LANES, tiles_at_most
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


def splash_cost(name: str, read: Sequence[Array], context: int) -> tuple[float, float]:
    """Operations of a call of splash attention on a device, at most, and bytes beyond operands and results once.

    Args:
      name: of the kernel; read: the arrays it reads, as they stand in the program; context: positions of a row.

    Raises:
      ValueError: it is another kernel.
    """
    products = {"fwd": 2, "dq": 3, "dkv": 4}.get(name.removeprefix("splash_mha_").split("_")[0])
    if products is None:
        raise ValueError(f"the step runs a kernel {name}, and what it does is not known: the plan would leave it out.")
    q, k = [array for array in read if len(array.shape) > 2 and array.type in ("bf16", "f32")][:2]
    *rows, n, queries, h = q.shape
    tiles, bq, bk = tiles_at_most(queries, k.shape[-2], context)
    # Each tile reads keys and values, or queries and gradients, and each head marks of its other side, a number a lane.
    inner, outer, marks = (bq, k.shape[-2], 1) if "dkv" in name else (bk, queries, 2)
    again = tiles * 2 * inner * q.bytes / (math.prod(q.shape[:-1])) + outer * marks * LANES * 4
    return math.prod(rows) * n * tiles * bq * bk * h * 2.0 * products, math.prod(rows) * n * again
