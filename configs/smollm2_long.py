"""The committed drafter, second run: 90 minutes on wider batches, going on from the drafter of configs/smollm2.py."""

import dataclasses

from configs.smollm2 import run as first

run = dataclasses.replace(
    first,
    out="runs/smollm2_long",
    warm_start=(),
    initial_drafter="runs/smollm2/drafter",
    batch_size=8,
    num_anchors=64,
    steps=2100,
    seed=1,
)
