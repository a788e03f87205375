"""A run that is stopped and started again is the run that was not stopped.

The number of steps is part of the compiled program (of its schedule), so tests stop early instead of changing it.
"""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from train.loop import Trainer


@pytest.fixture
def start(tiny_run, disk_target):
    """start(**fields): a trainer of the tiny run with these fields."""
    return lambda **fields: Trainer(dataclasses.replace(tiny_run, **fields), disk_target.model)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a.state, b.state)


def learnt(out):
    """The lines of metrics.jsonl, without what depends on the machine's mood."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


def test_twenty_steps_are_ten_and_ten(start, tmp_path):
    whole, first = start(), start(out=str(tmp_path / "parts"))
    whole.train(until=20)
    first.train(until=10)
    second = start(out=str(tmp_path / "parts"))
    assert second.step == 10
    assert_same(first, second)
    for step in (10, 15, 19):
        jax.tree.map(np.testing.assert_array_equal, whole.data.batch(step), second.data.batch(step))
    assert second.train(until=5) == {} and second.step == 10
    second.train(until=20)
    assert_same(whole, second)
    assert learnt(tmp_path / "run") == learnt(tmp_path / "parts")


def test_a_run_killed_between_checkpoints_repeats_the_steps_since(start, tmp_path):
    fields = {"checkpoint_every": 3, "log_every": 1}
    whole, killed = start(**fields), start(**fields, out=str(tmp_path / "killed"))
    whole.train(until=6)
    save = killed.checkpoints.save

    def die(step, state):
        if step == 6:
            raise KeyboardInterrupt
        save(step, state)

    killed.checkpoints.save = die
    with pytest.raises(KeyboardInterrupt):
        killed.train(until=6)
    # What a kill in the middle of a save leaves behind.
    half = tmp_path / "killed" / "checkpoints" / "6.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "junk").write_text("half")
    again = start(**fields, out=str(tmp_path / "killed"))
    assert again.step == 3
    again.train(until=6)
    assert_same(whole, again)
    assert learnt(tmp_path / "run") == learnt(tmp_path / "killed")


def test_metrics_of_a_run_without_a_checkpoint_come_once(start, tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    start(log_every=1).train(until=2)
    whole, before = path.read_text(), learnt(path.parent)
    for name in ("checkpoints", "run.json"):
        found = tmp_path / "run" / name
        found.unlink() if found.is_file() else shutil.rmtree(found)
    path.write_text(whole + '{"step": 3, "lo\n')
    start(log_every=1).train(until=2)
    assert learnt(path.parent) == before


@pytest.mark.filterwarnings("ignore")  # what Orbax leaves behind when it fails
def test_a_damaged_checkpoint_is_named_and_can_be_deleted(start):
    fields = {"checkpoint_every": 1}
    trainer = start(**fields)
    trainer.train(until=2)
    damaged = trainer.out / "checkpoints" / "2"
    for file in (damaged / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"{damaged} cannot be read: it is damaged\. Delete it"):
        start(**fields)
    shutil.rmtree(damaged)
    assert start(**fields).step == 1


def test_other_settings_are_refused(start):
    start().train(until=1)
    for fields in ({"block_size": 3}, {"seed": 1}, {"tap_ids": (0,)}, {"learning_rate": 1.0}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            start(**fields)
    assert start(steps=50, checkpoint_every=7, log_every=3, chunk=9).step == 1


def test_settings_can_change_before_the_first_checkpoint(start):
    start()
    assert start(block_size=3).drafter.config.block_size == 3


def test_other_data_of_the_same_size_is_refused(start, tiny_run, tmp_path):
    start().train(until=1)
    path = tiny_run.data[0]
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    rows[0]["answer"][0] += 1
    with open(path, "w") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"'answers\.jsonl', which is not there as it was.*Delete it to tokenise anew"):
        start()
    shutil.rmtree(tmp_path / "run" / "tokens")
    with pytest.raises(ValueError, match="crc"):
        start()


@pytest.mark.parametrize("at", [2, 4])
def test_a_run_that_breaks_down_leaves_a_good_checkpoint(start, at):
    trainer = start(checkpoint_every=2)
    step = trainer._step

    def broken(state, *args):
        state, metrics = step(state, *args)
        if int(state.step) == at:
            state = jax.tree.map(lambda x: x * jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else x, state)
            metrics["gradient_norm"] = jnp.nan * metrics["gradient_norm"]
        return state, metrics

    trainer._step = broken
    with pytest.raises(FloatingPointError, match=f"step {at} "):
        trainer.train()
    again = start(checkpoint_every=2)
    assert again.step == at - 2
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(again.state))


def test_a_run_can_go_on_from_a_drafter(start, tmp_path):
    first = start()
    first.train(until=2)
    path = str(first.export(tmp_path / "exported", dtype=jnp.float32))
    second = start(out=str(tmp_path / "second"), initial_drafter=path, num_anchors=8)
    assert second.step == 0
    jax.tree.map(np.testing.assert_array_equal, first.state.params, second.state.params)
    np.testing.assert_array_equal(first.drafter.draft_ids[...], second.drafter.draft_ids[...])
    with pytest.raises(ValueError, match=r"another shape.*block_size.*\(4, 3\)"):
        start(out=str(tmp_path / "third"), initial_drafter=path, block_size=3)
    with pytest.raises(ValueError, match="give one"):
        start(initial_drafter=path, warm_start=(0,))


@pytest.mark.parametrize(("head", "size"), [("vanilla", 40), ("rnn", 0)])
def test_a_draft_vocabulary_grows_and_keeps_what_it_knows(start, tmp_path, head, size):
    first = start(markov_head_type=head)
    first.train(until=2)
    path = str(first.export(tmp_path / "exported", dtype=jnp.float32))
    wider = dict(out=str(tmp_path / "second"), initial_drafter=path, draft_vocab_size=size, markov_head_type=head)
    second = start(**wider)
    old, new = first.drafter, second.drafter
    have = np.asarray(old.draft_ids[...])
    ids = np.arange(new.config.vocab_size) if new.draft_ids is None else np.asarray(new.draft_ids[...])
    assert len(have) < len(ids) and set(have) < set(ids) and (np.diff(ids) > 0).all()
    at = np.searchsorted(ids, have)
    np.testing.assert_array_equal(new.markov.w2[...][at], old.markov.w2[...])
    assert not np.delete(np.asarray(new.markov.w2[...]), at, axis=0).any()
    np.testing.assert_array_equal(new.draft_head(second.target)[at], old.draft_head(first.target))
    for path, leaf in nnx.to_flat_state(nnx.state(old, nnx.Param)):
        if path != ("markov", "w2"):
            np.testing.assert_array_equal(leaf[...], dict(nnx.to_flat_state(second.state.params))[path][...])
    second.train(until=2)
    assert np.asarray(second.drafter.markov.w2[...]).any(axis=1).sum() > len(have)
    again = start(**wider)
    assert again.step == 2
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again.drafter), nnx.state(second.drafter))


def test_a_run_can_train_the_confidence_head_alone(start, tmp_path):
    first = start()
    first.train(until=2)
    path = str(first.export(tmp_path / "exported", dtype=jnp.float32))
    alone = dict(out=str(tmp_path / "second"), initial_drafter=path, train_only=("confidence",))
    second = start(**alone)
    assert second.train(until=2)["gradient_norm"] > 0
    for path, leaf in nnx.to_flat_state(nnx.state(first.drafter)):
        after = dict(nnx.to_flat_state(nnx.state(second.drafter)))[path]
        assert (path[0] == "confidence") != np.array_equal(leaf[...], after[...]), path
    again = start(**alone)
    assert again.step == 2
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again.drafter), nnx.state(second.drafter))
    with pytest.raises(ValueError, match=r"train_only names \['confident'\]; this drafter has .*'confidence'"):
        start(**alone | {"train_only": ("confident",)})
    with pytest.raises(ValueError, match="give initial_drafter"):
        start(train_only=("confidence",))
