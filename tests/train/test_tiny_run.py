"""configs/tiny.py: its numbers after one step, and everything from prompts to an exported drafter."""

import json
import sys

import numpy as np

from configs import tiny
from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.checkpoints.target import load_target
from dspark_jax.decoding.generate import generate, speculative_generate
from train import __main__ as command
from train.loop import Trainer
from train.regenerate import Regenerate

REFERENCE = {
    "loss": 3.00996,
    "ce": 6.03956,
    "l1": 1.57441,
    "confidence": 0.98904,
    "tau": 1.24852,
    "gradient_norm": 5.06458,
    "supervised": 125,
}


def test_metrics_after_one_step(tiny_run, disk_target):
    metrics = Trainer(tiny_run, disk_target.model).train(until=1)
    for name, expected in REFERENCE.items():
        np.testing.assert_allclose(
            metrics[name],
            expected,
            rtol=1e-3,
            err_msg=f"{name} changed after one step of configs/tiny.py. If the change of model, data order, loss or "
            "initial values is meant, put the new value into REFERENCE and say why in the commit; else it is a fault.",
        )


def test_prompts_to_drafter(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", tiny.__file__, "--log-every", "10"])
    tiny.write_target(tiny.run.target)
    tiny.write_prompts("runs/tiny/sums.jsonl", count=6)
    Regenerate(
        ("runs/tiny/sums.jsonl",), tiny.run.data[0], target=tiny.run.target, max_tokens=20, max_length=64, rows=4
    ).run()
    command.main()
    assert "exported" in capsys.readouterr().out
    assert len((tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()) == 4
    target = load_target(tiny.run.target)
    drafter = load_drafter("runs/tiny/drafter", target=target.model)
    row = json.loads((tmp_path / tiny.run.data[0]).read_text().splitlines()[0])
    options = {"max_tokens": 20, "temperature": 0}
    assert (
        speculative_generate(target.model, drafter, [row["prompt"]], **options)[0].tokens
        == generate(target.model, [row["prompt"]], **options)[0].tokens
    )
