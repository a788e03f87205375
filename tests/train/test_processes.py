"""Two processes on one machine are one run."""

import json
import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.train.conftest import write_answers
from train.distributed import Processes


def train(directory, out, devices, *args):
    """Starts `python -m train` on the tiny run in a process with this many virtual devices."""
    flags = {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    options = ["--target", str(directory), "--data", str(out.parent / "answers.jsonl"), "--out", str(out)]
    sizes = [
        "--batch-size",
        "8",
        "--steps",
        "4",
        "--checkpoint-every",
        "2",
        "--log-every",
        "1",
        "--mesh",
        "2",
        "2",
        "2",
    ]
    command = [sys.executable, "-m", "train", "configs/tiny.py", *options, *sizes, *args]
    return subprocess.Popen(command, env={**os.environ, **flags}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def start_together(directory, out, *args):
    """Two processes of four devices each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    join = ["--processes", "2", "--coordinator", f"127.0.0.1:{port}"]
    return [train(directory, out, 4, *join, "--process", str(i), *args) for i in range(2)]


def together(directory, out, *args):
    """Runs both; what they printed."""
    both = start_together(directory, out, *args)
    said = [process.communicate(timeout=900)[0].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(said)
    return said


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("source", [(), ("--cache-features",)], ids=["live", "cached"])
def test_two_processes_train_as_one(tmp_path, tiny_directory, source):
    write_answers(tmp_path / "answers.jsonl")
    alone, both = tmp_path / "alone", tmp_path / "both"
    process = train(tiny_directory, alone, 8, *source)
    said = process.communicate(timeout=900)[0].decode()
    assert process.returncode == 0, said
    spoken, silent = together(tiny_directory, both, *source)
    assert "exported" in spoken and "step" not in silent and "features" not in silent
    one, two = ([path.name for path in sorted(out.glob("features/*.array_record"))] for out in (alone, both))
    # The four devices along data and fsdp write shards of their own, two of them in each process.
    assert one == two and len(one) == (4 if source else 0)
    assert len(losses(alone)) == 4
    np.testing.assert_allclose(losses(both), losses(alone), rtol=1e-5)
    one, two = (load_file(out / "drafter" / "model.safetensors") for out in (alone, both))
    for name in one:
        np.testing.assert_allclose(two[name].astype(np.float32), one[name].astype(np.float32), atol=1e-2, err_msg=name)


@pytest.mark.slow
def test_all_processes_stop_when_one_is_told(tmp_path, tiny_directory):
    write_answers(tmp_path / "answers.jsonl")
    out = tmp_path / "both"
    many = ["--steps", "4000", "--checkpoint-every", "4000"]
    both = start_together(tiny_directory, out, *many)
    while not (out / "metrics.jsonl").is_file() or len(losses(out)) < 3:
        assert all(process.poll() is None for process in both)
        time.sleep(0.1)
    both[1].terminate()
    said = [process.communicate(timeout=900)[0].decode() for process in both]
    assert [process.returncode for process in both] == [143, 143], "\n".join(said)
    (saved,) = (path.name for path in (out / "checkpoints").iterdir())
    assert f"stopped by SIGTERM; checkpoint {saved} is saved" in said[0] and "stopped" not in said[1]
    assert len(losses(out)) == int(saved) < 4000
    steps = str(int(saved) + 2)
    together(tiny_directory, out, "--steps", steps, "--checkpoint-every", "4000")
    assert len(losses(out)) == int(steps)


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        (Processes("two"), "--processes N or auto"),
        (Processes("2", 2, "host:1"), "--process within"),
        (Processes("2", 0), "need --coordinator"),
    ],
)
def test_processes_that_cannot_join_are_told_why(processes, message):
    with pytest.raises(ValueError, match=message):
        processes.join()
