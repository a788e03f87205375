"""The released recipe of drafters for Qwen3 (DeepSpec's configs), and what fits it into a TPU's memory.

The data are the target's own answers to 1.3 million prompts of Open-PerfectBlend, without thinking; `steps` is ten
epochs of them at one a row, `python -m train.tokenize` says how many an epoch has when they are packed.
"""

import dataclasses

from train.config import RunConfig
from train.data.turns import ChatOptions
from train.losses import LossWeights

DSPARK = RunConfig(
    out="",
    chat=ChatOptions(thinking=False),
    num_layers=5,
    block_size=7,
    mask_token_id=151669,
    markov_rank=256,
    draft_vocab_size=0,
    seq_len=4096,
    batch_size=512,
    num_anchors=512,
    steps=25_000,
    checkpoint_every=500,
    log_every=10,
    chunk=512,
    attention_chunk=32,
    query_chunk=512,
    remat=True,
    scan_layers=True,
    compute_dtype="bfloat16",
    mesh=(1, -1, 1),
)
DFLASH = dataclasses.replace(DSPARK, markov_rank=0, weights=LossWeights(ce=1.0, tv=0.0, confidence=0.0))
# The release starts a block at every token; here they start at 512 sampled anchors, as DSpark's do.
EAGLE3 = dataclasses.replace(
    DSPARK, kind="eagle3", num_layers=1, markov_rank=0, weights=LossWeights.training_time_test(step_decay=0.8)
)

TAPS = {"4B": (1, 9, 17, 25, 33), "8B": (1, 9, 17, 25, 33), "14B": (1, 10, 19, 28, 37)}


def recipe(base: RunConfig, name: str, size: str) -> RunConfig:
    """The run of a kind of drafter, under a name, for the Qwen3 target of a size."""
    target = f"qwen3-{size.lower()}"
    return dataclasses.replace(
        base,
        out=f"runs/{name}-{target}",
        data=(f"runs/data/{target}-answers.jsonl",),
        tokens=f"runs/data/{target}-tokens",
        target=f"Qwen/Qwen3-{size}",
        tap_ids=TAPS[size],
    )
