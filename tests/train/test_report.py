"""What is told of a run: metrics.jsonl, TensorBoard, the console, and the batch that broke it."""

import dataclasses
import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tensorboardX.proto.event_pb2 import Event

from dspark_jax import chips
from train import flops
from train.loop import Trainer

TIMES = {"seconds", "tokens_per_second", "mfu", "memory_gb"}


@pytest.fixture
def start(tiny_run, disk_target):
    """start(**fields): a trainer of the tiny run with these fields."""
    return lambda **fields: Trainer(dataclasses.replace(tiny_run, **fields), disk_target.model, disk_target.tokenizer)


def lines(trainer):
    return [json.loads(line) for line in (trainer.out / "metrics.jsonl").read_text().splitlines()]


def events(file):
    """The events of a file of records: 8 bytes of length, 4 of its checksum, data, 4 of its checksum."""
    data = file.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_metrics_are_told_everywhere(start, monkeypatch, capsys):
    monkeypatch.setitem(chips.PEAKS, jax.devices()[0].device_kind, 1e12)
    trainer = start(log_every=1)
    trainer.train(until=3)
    one, two, three = lines(trainer)
    assert not TIMES & one.keys() and {"confidence_error", "loss"} < one.keys()
    for line in (two, three):
        assert line["tokens_per_second"] == pytest.approx(2 * 128 / line["seconds"])
        asked = sum(flops.model_flops(trainer.run, trainer.target.config).values())
        assert line["mfu"] == pytest.approx(asked / line["seconds"] / 1e12) and "memory_gb" not in line
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and "tokens/s MFU" in said[1] and f"(off by {two['confidence_error']:.3f})" in said[1]
    assert f"accept [{two['accept_rate'][0]:.2f} " in said[1]
    (file,) = (trainer.out / "tensorboard").iterdir()
    told = {(v.tag, e.step): v.simple_value for e in events(file) for v in e.summary.value}
    assert told["loss", 3] == pytest.approx(three["loss"])
    assert told["accept_rate/2", 2] == pytest.approx(two["accept_rate"][1])


@pytest.mark.parametrize(("kind", "peak"), [("NVIDIA H100 80GB HBM3", 989e12), ("TPU v5 lite", 197e12), ("cpu", None)])
def test_peaks_go_by_the_device(kind, peak):
    assert chips.peak_flops(type("Device", (), {"device_kind": kind})) == peak


def test_the_batch_that_breaks_a_run_is_kept(tiny_run, disk_target, tmp_path):
    data, draw = tmp_path / "answers.jsonl", np.random.default_rng(0)
    rows = [{"prompt": [3], "answer": draw.integers(3, 40, int(draw.integers(20, 60))).tolist()} for _ in range(40)]
    target = nnx.clone(disk_target.model)
    target.embedding[...] = target.embedding[...].at[2].set(jnp.nan)

    def start(name):
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        run = dataclasses.replace(tiny_run, data=(str(data),), checkpoint_every=2, out=str(tmp_path / name))
        return Trainer(run, target)

    good = start("good").data
    assert good.steps_per_epoch > 3
    rows[good.pieces(2)[1][0].document]["prompt"] = [2]  # in the second row of step 3 alone
    trainer = start("bad")
    # The metrics of step 3 are read when step 4 is on its way.
    with pytest.raises(FloatingPointError, match=r"step 3 is nan.*bad_batch_3\.npz, the last checkpoint is untouched"):
        trainer.train()
    kept, batch = np.load(trainer.out / "bad_batch_3.npz"), trainer.data.batch(2)
    assert kept["step"] == 3 and (kept["tokens"] == 2).any(axis=1).tolist() == [False, True]
    for name in ("tokens", "supervised", "positions", "segments"):
        np.testing.assert_array_equal(kept[name], getattr(batch, name))
    again = start("bad")
    assert again.step == 2 and all(np.isfinite(x).all() for x in jax.tree.leaves(again.state))

    features = [np.ones((2, 4), jnp.bfloat16)] * 2 + [np.zeros(2, np.float32)]
    part = dataclasses.replace(batch, features=tuple(features))
    kept = np.load(
        trainer._keep_batch(7, {1: part, 0: dataclasses.replace(part, features=(features[0] * 0, *features[1:]))})
    )
    assert kept["hidden"].dtype == np.float32 and kept["hidden"][:, 0].tolist() == [0, 0, 1, 1] and "taps" in kept
