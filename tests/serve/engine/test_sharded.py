"""Split over eight devices by heads, the engine gives what it gives on one."""

import json
import os
import subprocess
import sys


def test_tensor_parallel_requests_equal_those_of_one_device():
    flags = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, "-m", "tests.serve.engine.sharded"]
    run = subprocess.run(
        command, env={**os.environ, **flags}, check=True, timeout=900, stdout=subprocess.PIPE, text=True
    )
    one, eight = json.loads(run.stdout.splitlines()[-1])
    assert (one["devices"], eight["devices"]) == (1, 8) and "tensor" in eight["split"]
    assert eight["tokens"] == one["tokens"]
    assert eight["accepted"] == one["accepted"] > 20
    assert eight["compiled"] == 0
