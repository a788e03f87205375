"""A run killed while it writes a checkpoint, or told to stop, goes on to the parameters of an unbroken one."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import tiny
from tests.conftest import PROGRAMS
from train.__main__ import main
from train.loop import Trainer
from train.report import Report


def arguments(run, out):
    """The command line that trains this run into `out`, with a checkpoint after every step."""
    files = ["--target", run.target, "--data", *run.data, "--out", str(out)]
    return [tiny.__file__, *files, "--checkpoint-every", "1", "--log-every", "1"]


def child(run, out):
    """A process of `python -m train`."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(PROGRAMS), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    command = [sys.executable, "-m", "train", *arguments(run, out)]
    return subprocess.Popen(command, env={**os.environ, **cache}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def committed(checkpoints: Path) -> list[int]:
    return sorted(int(path.name) for path in checkpoints.glob("*") if path.name.isdigit())


def halves(checkpoints: Path) -> list[Path]:
    """Checkpoints that are being written, and of which something is there."""
    return [path for path in checkpoints.glob("*.orbax-checkpoint-tmp*") if any(x.is_file() for x in path.rglob("*"))]


def kill_in_a_save(process: subprocess.Popen, checkpoints: Path) -> None:
    """Kills a process while a checkpoint is half written, and others are whole: it is stopped first, to be sure."""
    while process.poll() is None:
        if len(committed(checkpoints)) > 1 and halves(checkpoints):
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.01)
            if halves(checkpoints):
                process.kill()
                break
            process.send_signal(signal.SIGCONT)
    said = process.communicate()[0].decode()
    assert process.returncode == -signal.SIGKILL, said


def start(run, target, out):
    """A trainer of the run into `out`."""
    return Trainer(dataclasses.replace(run, out=str(out)), target.model, target.tokenizer)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a.state, b.state)


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written(tiny_run, disk_target, tmp_path):
    out = tmp_path / "killed"
    checkpoints = out / "checkpoints"
    kill_in_a_save(child(tiny_run, out), checkpoints)
    (half,), last = halves(checkpoints), committed(checkpoints)[-1]
    assert half.name.startswith(f"{last + 1}.")
    whole, resumed = (start(tiny_run, disk_target, o) for o in (tmp_path / "whole", out))
    whole.train(until=last)
    assert resumed.step == last and not half.exists()
    assert_same(resumed, whole)
    for trainer in (whole, resumed):
        trainer.train()
    assert_same(resumed, whole)


def test_sigterm_saves_a_checkpoint_and_ends(tiny_run, disk_target, tmp_path, monkeypatch, capsys):
    out = tmp_path / "told"
    monkeypatch.setattr(sys, "argv", ["train", *arguments(tiny_run, out), "--checkpoint-every", "30"])
    tell = Report.step

    def told(report, step, values):
        tell(report, step, values)
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Report, "step", told)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main()
    monkeypatch.undo()
    assert ended.value.code == 143 and signal.getsignal(signal.SIGTERM) is before
    # Metrics come a step late: step 4 is read while step 5 runs, and that is finished.
    assert committed(out / "checkpoints") == [5]
    assert "stopped by SIGTERM; checkpoint 5 is saved" in capsys.readouterr().out
    assert not (out / "drafter").exists()
    whole, resumed = (start(tiny_run, disk_target, o) for o in (tmp_path / "whole", out))
    assert resumed.step == 5
    for trainer in (whole, resumed):
        trainer.train(until=10)
    assert_same(resumed, whole)


@pytest.mark.slow
def test_a_process_is_told_by_sigterm(tiny_run, tmp_path):
    process = child(tiny_run, tmp_path / "told")
    assert process.stdout
    said = ""
    while "step     3" not in said:
        line = process.stdout.readline().decode()
        assert line, said
        said += line
    process.terminate()
    said += process.communicate()[0].decode()
    last = committed(tmp_path / "told" / "checkpoints")[-1]
    assert process.returncode == 143 and f"stopped by SIGTERM; checkpoint {last} is saved" in said, said
