"""The committed drafter, third run: an hour on twice the answers, half of them chat, and a larger draft vocabulary."""

import dataclasses

from configs.smollm2_long import run as long

run = dataclasses.replace(
    long,
    out="runs/smollm2_chat",
    data=("runs/data/answers.jsonl", "runs/data/chat_answers.jsonl"),
    initial_drafter="runs/smollm2_long/drafter",
    draft_vocab_size=12288,
    steps=1200,
    learning_rate=1.5e-3,
    seed=2,
)
