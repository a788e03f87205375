"""Eagle3 with training-time test, on the target and the answers of configs/tiny.py."""

import dataclasses

from configs import tiny
from train.losses import LossWeights

run = dataclasses.replace(
    tiny.run,
    out="runs/tiny-eagle3",
    kind="eagle3",
    markov_rank=0,
    weights=LossWeights.training_time_test(),
)
