"""Accepted lengths in the run are those of generation with the drafter as it is."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from configs.tiny import write_prompts
from dspark_jax.decoding import generate
from dspark_jax.decoding.generate import Generator, Request
from train.config import RunConfig
from train.loop import Trainer

TOKENS = 12


@pytest.fixture
def start(tiny_run, disk_target, tmp_path):
    """start(**fields): a trainer of the tiny run that evaluates on two files of prompts, with these fields."""
    data = [str(tmp_path / f"{name}.jsonl") for name in ("sums", "more")]
    for seed, path in enumerate(data):
        write_prompts(path, count=4, seed=seed)
    evaluate = {"eval_every": 10, "eval_data": tuple(data), "eval_prompts": 2, "eval_tokens": TOKENS}

    def start(tokenizer=disk_target.tokenizer, **fields):
        return Trainer(dataclasses.replace(tiny_run, **evaluate | fields), disk_target.model, tokenizer)

    return start


@pytest.mark.slow
def test_lengths_are_those_of_generation(start, disk_target, capsys):
    trainer, programs, seen = start(), [], []
    evaluate = trainer._evaluation
    trainer._evaluation = lambda drafter: seen.append(nnx.state(drafter)) or evaluate(drafter)
    for until in (10, 20):
        trainer.train(until=until)
        programs.append([f._cache_size() for f in (generate._prefill, generate._rounds, generate._insert)])
    assert programs[0] == programs[1]
    lines = map(json.loads, (trainer.out / "metrics.jsonl").read_text().splitlines())
    told = [line for line in lines if "accept_length" in line]
    assert [line["step"] for line in told] == [10, 20]
    jax.tree.map(np.testing.assert_array_equal, seen[1], nnx.state(trainer.drafter))
    assert not np.array_equal(seen[0].fc.weight[...], seen[1].fc.weight[...])
    generator, said = Generator(disk_target.model, trainer.drafter), capsys.readouterr().out
    for path in trainer.run.eval_data:
        with open(path) as file:
            texts = [json.loads(line)["turns"][0] for line in file][:2]
        requests = [Request(disk_target.tokenizer.encode_chat(text), TOKENS) for text in texts]
        lengths = np.concatenate([g.accept_lengths for g in generator.generate(requests)])
        domain = path.rsplit("/", 1)[-1].removesuffix(".jsonl")
        assert told[-1]["accept_length"][domain] == pytest.approx(lengths.mean())
        assert f"{domain} {lengths.mean():.3f}" in said


def test_what_cannot_be_evaluated_is_refused(start, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="needs a tokenizer"):
        start(tokenizer=None)
    path = start().run.eval_data[0]
    with pytest.raises(ValueError, match="of different names"):
        start(eval_data=(path, path))
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="files with prompts"):
        start(eval_data=(str(tmp_path / "none.jsonl"),))
    (tmp_path / "long.jsonl").write_text(json.dumps({"turns": ["a" * 300]}))
    with pytest.raises(ValueError, match="303 tokens; the target takes at most 255"):
        start(eval_data=(str(tmp_path / "long.jsonl"),))
    monkeypatch.setattr("train.evaluation.jax.process_count", lambda: 2)
    with pytest.raises(ValueError, match="generates in one process, this run has 2"):
        start()
    for fields in ({"eval_every": 3}, {"eval_data": ("a.jsonl",)}):
        with pytest.raises(ValueError, match="must be given together"):
            RunConfig(out="x", **fields)
