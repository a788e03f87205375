"""A drafter that knows four conversations by heart drafts them: training, export, reading and generation agree."""

import dataclasses
import json

import numpy as np

from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.decoding.generate import generate, speculative_generate
from train.loop import Trainer

TOKENS = 40


def test_an_overfitted_drafter_is_accepted(tiny_run, disk_target, tmp_path):
    target = disk_target.model
    prompts = np.random.default_rng(0).integers(3, 40, size=(4, 5)).tolist()
    answers = [g.tokens for g in generate(target, prompts, max_tokens=TOKENS, ignore_eos=True)]
    data = tmp_path / "four.jsonl"
    pairs = zip(prompts, answers, strict=True)
    data.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in pairs))
    run = dataclasses.replace(
        tiny_run, data=(str(data),), num_layers=2, num_anchors=64, steps=250, checkpoint_every=250, log_every=50
    )
    trainer = Trainer(run, target)
    metrics = trainer.train()
    assert metrics["tau"] > run.block_size - 0.5 - 0.5  # sampled at temperature 1 the target itself is not certain

    drafter = load_drafter(trainer.export(), target=target)
    drafted = speculative_generate(target, drafter, prompts, max_tokens=TOKENS, ignore_eos=True)
    assert [g.tokens for g in drafted] == answers
    # Rounds near the end of an answer verify fewer drafts.
    whole = [g.accept_lengths[g.scheduled == run.block_size] - 1 for g in drafted]
    assert np.mean(np.concatenate(whole)) >= run.block_size - 0.5
