"""How commands end when something is wrong that a user can see and mend."""

import subprocess
import sys

import pytest

from dspark_jax.cli.mistakes import told_in_one_line


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        IsADirectoryError(21, "Is a directory", "d"),
        OSError(28, "No space"),
        FloatingPointError("nan"),
    ],
)
def test_a_mistake_is_one_line(error, capsys):
    with pytest.raises(SystemExit) as ended, told_in_one_line("dspark"):
        raise error
    assert ended.value.code == 2 and capsys.readouterr().err == f"dspark: {error}\n"


def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(KeyError), told_in_one_line("dspark"):
        raise KeyError("x")


def test_a_reader_that_leaves_ends_the_command_without_a_word():
    code = (
        "from dspark_jax.cli.mistakes import told_in_one_line\n"
        "with told_in_one_line('dspark'):\n    for _ in range(10**6):\n        print('text', flush=True)\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes, text=True) as process:
        assert process.stdout and process.stdout.readline() == "text\n"
        process.stdout.close()
        assert process.stderr and process.stderr.read() == ""
        assert process.wait(60) == 141
