"""The console command as a real process, on the embedded default."""

import json
import os
import subprocess
import sys

import pytest

from dspark_jax.cli import main
from dspark_jax.cli.models import ModelOptions

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
        (["generate", "--prompt", "a", "--survival", "nan"], "--survival must be within 0..1, got nan"),
        (["generate", "--prompt", "a", "--survival", "-1"], "--survival must be within 0..1, got -1"),
        (["evaluate"], "expected at least one file"),
        (["evaluate", "nowhere.jsonl"], "nowhere.jsonl"),
        (["evaluate", "nowhere.jsonl", "--limit", "0"], "--limit must be 1 or more, got 0"),
        (["evaluate", "nowhere.jsonl", "--limit", "-1"], "--limit must be 1 or more, got -1"),
    ],
)
def test_mistakes_end_with_exit_code_2_and_a_message(args, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_closed_stdin_is_an_empty_prompt(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit) as ended:
        main(["generate"])
    assert ended.value.code == 2 and "the prompt is empty" in capsys.readouterr().err


def test_prompts_too_long_for_the_target_are_skipped_and_counted(golden, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dspark_jax.cli.models.cache_programs", lambda: None)
    monkeypatch.setattr("dspark_jax.cli.evaluate.prompt_ids", lambda _, text: [1 + ord(c) % 30 for c in text])
    case = golden("qwen3_dspark_markov")
    models = ["--target", str(case.directory / "target"), "--drafter", str(case.directory / "draft")]
    long, path = "a" * case.target.config.max_positions, tmp_path / "p.jsonl"

    def evaluate(*texts, rows="2"):
        path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
        main(["evaluate", str(path), *models, "--max-tokens", "12", "--temperatures", "0", "--rows", rows])

    evaluate("ab", long, "bcd", long)
    assert "2 of 4 prompts skipped" in capsys.readouterr().err
    nothing = "holds no prompt of 1 to 255 tokens"
    for texts, rows, says in (([], "2", nothing), ([long], "2", nothing), (["a"], "0", "rows must be 1 or more")):
        with pytest.raises(SystemExit) as ended:
            evaluate(*texts, rows=rows)
        assert ended.value.code == 2 and says in capsys.readouterr().err


def test_drafts_a_round_are_what_was_asked_for_or_what_pays():
    assert ModelOptions().drafts == 3
    assert ModelOptions(block_size=5).drafts == 5
    assert ModelOptions(drafter="elsewhere").drafts is None
