"""The console command as a real process, on the embedded default."""

import os
import subprocess
import sys

import pytest

from dspark_jax.cli import main

PROMPT = "What is 17 * 24?"


def dspark(*args: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
    command = [sys.executable, "-m", "dspark_jax", *args]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, env=environment, timeout=600, check=False
    )


@pytest.mark.slow
def test_generate_streams_text_and_compares():
    run = dspark("generate", "--prompt", PROMPT, "--max-tokens", "12", "--compare")
    assert run.returncode == 0, run.stderr
    assert "text: identical" in run.stderr and "tokens/s" in run.stderr
    piped = dspark("generate", "--max-tokens", "12", text=PROMPT + "\n")
    assert piped.stdout == run.stdout != "\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "--prompt", ""], "the prompt is empty"),
        (["generate", "--prompt", "a", "--target", "./nowhere", "--drafter", "none"], "does not exist"),
        (["generate", "--prompt", "a", "--target", "x/y"], "no default drafter"),
        (["inspect", "./nowhere"], "does not exist"),
        (["generate", "--temprature", "1"], "temprature"),
    ],
)
def test_mistakes_end_with_exit_code_2_and_a_message(args, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2 and message in capsys.readouterr().err
