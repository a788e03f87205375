"""The command that tokenises: its counts, and the mask one can see."""

import io
import json
import sys

import numpy as np
import pytest
from rich.console import Console

from train import tokenize
from train.data import RowReader, TokenStore
from train.loop import Trainer
from train.tokenize import Tokenize, highlighted

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.fixture
def run(tiny_run, tmp_path):
    """A run on a conversation, a row of ids and one that is skipped, after what the tiny run has."""
    path = tmp_path / "more.jsonl"
    rows = {"messages": TALK}, {"prompt": [3], "answer": [4, 5]}, {"messages": TALK[:1]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tiny_run.__class__(**{**vars(tiny_run), "data": (str(path),)})


def printed(command):
    out = io.StringIO()
    command.main(Console(file=out, width=80))
    return out.getvalue()


def test_counts_packing_and_documents_are_printed(run, tmp_path):
    said = printed(Tokenize(run, show=5))
    tokens = TokenStore.open(tmp_path / "run" / "tokens").lengths.tolist()
    assert f"3 rows: 2 documents, {sum(tokens)} tokens, 8 of them supervised" in said
    assert f"skipped 1: no assistant turn (first: {run.data[0]}:3)" in said
    assert f"rows of 128 tokens, {sum(tokens) / 128:.1%} full: 1 steps an epoch; 0 documents are longer" in said
    assert "document 0: 11 tokens, 6 supervised" in said and "document 1: 3 tokens, 2 supervised" in said
    assert "document 1: 3 tokens" in printed(Tokenize(run, show=1, first=1))


def test_what_is_supervised_is_bold_and_nothing_else(disk_target):
    tokenizer = disk_target.tokenizer
    ids = np.array(tokenizer.encode("<user>ab<end><assistant>cd<end>"))
    text = highlighted(tokenizer, ids, np.arange(len(ids)) >= 5)
    bold = [text.plain[span.start : span.end] for span in text.spans if "bold" in span.style]
    assert [part.replace(" ", "") for part in bold] == ["⟦cd<end>⟧"]
    assert text.plain.replace(" ", "") == "<user>ab<end><assistant>⟦cd<end>⟧"


def test_mistakes_end_with_one_line(tmp_path, monkeypatch, capsys, tiny_directory):
    config = tmp_path / "config.py"
    config.write_text("from configs.tiny import run\n")
    options = ["--target", str(tiny_directory), "--data", "missing.jsonl", "--out", str(tmp_path / "o"), "--show", "2"]
    options += ["--chat.thinking", "False"]  # as `python -m train` calls it
    monkeypatch.setattr(sys, "argv", ["tokenize", str(config), *options])
    with pytest.raises(SystemExit) as end:
        tokenize.main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1 and said.startswith("tokenize: missing.jsonl is no file")


def test_a_run_takes_the_tokens_that_are_there(run, disk_target, monkeypatch):
    Tokenize(run).main(Console(file=io.StringIO()))
    monkeypatch.setattr(RowReader, "read", None)
    trainer = Trainer(run, disk_target.model, disk_target.tokenizer)
    assert trainer.counts.documents == 2 and trainer.data.batch(0).supervised.sum() == 8 + 8
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"tokens made otherwise.*tokenizer"):
        Trainer(run, disk_target.model)
