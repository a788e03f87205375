"""Plans that cannot be made end in one line; what one costs hangs on libtpu, which tests do not have."""

import subprocess
import sys


def test_what_cannot_be_planned_is_told_in_one_line(tmp_path):
    command = [sys.executable, "-m", "serve.plan", str(tmp_path), str(tmp_path), "--topology", "v9:2x2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].startswith("python -m serve.plan: --topology must be a slice of v4, v5e")
