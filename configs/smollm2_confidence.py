"""The committed drafter, last run: its confidence head alone, on answers that no earlier run has seen.

A drafter this small and trained on this little accepts more on its training text than elsewhere, and says so.
"""

import dataclasses

from configs.smollm2_chat import run as chat

run = dataclasses.replace(
    chat,
    out="runs/smollm2_confidence",
    data=("runs/data/unseen_answers.jsonl",),
    initial_drafter="runs/smollm2_chat/drafter",
    train_only=("confidence",),
    steps=250,
    learning_rate=2e-3,
    seed=3,
)
