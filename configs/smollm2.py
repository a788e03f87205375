"""The committed drafter of SmolLM2-135M-Instruct: about two hours on two CPU cores."""

from train.config import RunConfig

run = RunConfig(
    out="runs/smollm2",
    data=("runs/data/answers.jsonl",),
    num_layers=2,
    block_size=5,
    markov_rank=64,
    warm_start=(28, 29),
    num_anchors=256,
    steps=400,
    learning_rate=8e-4,
)
