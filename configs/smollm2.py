"""The committed drafter of SmolLM2-135M-Instruct, first run: half an hour on two CPU cores, with the answers there."""

from train.config import RunConfig
from train.losses import LossWeights

run = RunConfig(
    out="runs/smollm2",
    data=("runs/data/answers.jsonl",),
    num_layers=2,
    block_size=5,
    markov_rank=64,
    warm_start=(28, 29),
    batch_size=2,
    num_anchors=256,
    chunk=512,
    steps=800,
    learning_rate=2e-3,
    # Far from the target the total variation has almost no gradient; on a short run cross-entropy leads the way.
    weights=LossWeights(ce=0.5),
    cache_features=True,
    share_targets=True,
)
