"""MTP-1, on the target and the answers of configs/tiny.py."""

import dataclasses

from configs import tiny
from train.losses import LossWeights

run = dataclasses.replace(
    tiny.run,
    out="runs/tiny-mtp",
    kind="mtp",
    block_size=1,
    tap_ids=(),
    markov_rank=0,
    weights=LossWeights.training_time_test(),
)
