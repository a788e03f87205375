"""Answers of the target: which prompts, which rows, and the same after a kill."""

import json
import sys

import pytest

from configs.tiny import write_prompts
from dspark_jax.decoding.generate import generate
from train import regenerate
from train.answers import interleave, read_answers, request_seed
from train.data import ChatOptions, RowReader, read_documents
from train.regenerate import Regenerate


@pytest.fixture
def command(tmp_path, tiny_directory):
    """command(**fields): answers two domains of five and three prompts."""
    write_prompts(tmp_path / "sums.jsonl", count=5)
    write_prompts(tmp_path / "more.jsonl", count=3, seed=1)
    paths = (str(tmp_path / "sums.jsonl"), str(tmp_path / "more.jsonl"))
    defaults = dict(temperature=1.0, max_tokens=12, max_length=64, rows=3)
    out, target = str(tmp_path / "out" / "answers.jsonl"), str(tiny_directory)
    return lambda **fields: Regenerate(**{**defaults, "prompts": paths, "out": out, "target": target, **fields})


def rows_of(path):
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    return {(row["domain"], row["index"]): row for row in rows}


def test_domains_take_turns(command):
    turns = [name for name, _ in interleave(command().prompts)]
    assert turns == [*((d, i) for i in range(3) for d in ("sums", "more")), ("sums", 3), ("sums", 4)]
    assert [name for name, _ in interleave(command().prompts, 3)] == turns[:3]
    assert [name for name, _ in interleave(command().prompts, 99)] == turns


def test_each_prompt_is_answered_once_by_the_target(command, disk_target):
    assert command().run(disk_target) == 8
    rows = rows_of(command().out)
    assert len(rows) == 8
    for (domain, index), row in rows.items():
        text = read_turn(command(), domain, index)
        assert row.keys() == {"domain", "index", "prompt", "answer", "settings"}
        assert row["prompt"] == disk_target.tokenizer.encode_chat(text)
        alone = generate(
            disk_target.model,
            [row["prompt"]],
            max_tokens=12,
            temperature=1.0,
            seed=request_seed(0, domain, index),
            max_length=64,
        )
        assert row["answer"] == alone[0].tokens
    for (tokens, supervised), row in zip(documents([command().out]), rows.values(), strict=True):
        assert tokens.tolist() == row["prompt"] + row["answer"]
        assert tokens[supervised].tolist() == row["answer"]


def documents(paths):
    return read_documents(paths, RowReader(None, 48, ChatOptions()))


def read_turn(command, domain, index):
    path = next(p for p in command.prompts if p.endswith(f"{domain}.jsonl"))
    with open(path) as file:
        return json.loads(file.readlines()[index])["turns"][0]


@pytest.mark.parametrize("cut", ["between rows", "in a row"])
def test_a_killed_run_goes_on_with_the_same_answers(command, disk_target, tmp_path, cut):
    command().run(disk_target)
    whole = rows_of(command().out)
    with open(command().out) as file:
        lines = file.readlines()
    text = "".join(lines[:3]) + ("" if cut == "between rows" else lines[3][:-1])
    with open(command().out, "w") as file:
        file.write(text)
    assert command(rows=2).run(disk_target) == 5
    with open(command().out) as file:
        assert file.readlines()[:3] == lines[:3]
    assert rows_of(command().out) == whole
    assert command().run(disk_target) == 0


def test_more_prompts_are_added(command, disk_target):
    assert command(limit=3).run(disk_target) == 3
    assert command().run(disk_target) == 5
    assert len(rows_of(command().out)) == 8


def test_the_seed_changes_answers(command, disk_target, tmp_path):
    command(limit=3).run(disk_target)
    command(limit=3, seed=1, out=str(tmp_path / "other.jsonl")).run(disk_target)
    ours, others = rows_of(command().out), rows_of(tmp_path / "other.jsonl")
    assert ours.keys() == others.keys()
    assert all(ours[name]["answer"] != others[name]["answer"] for name in ours)
    assert len({request_seed(0, d, i) for d in ("a", "b") for i in range(1000)}) == 2000


def test_prompts_that_do_not_fit_are_skipped_and_counted(command, disk_target, tmp_path, capsys):
    (tmp_path / "sums.jsonl").write_text(json.dumps({"turns": ["a" * 60]}) + "\n" + json.dumps({"turns": ["a"]}) + "\n")
    assert command().run(disk_target) == 4
    assert "1 skipped" in capsys.readouterr().err
    assert ("sums", 0) not in rows_of(command().out) and ("sums", 1) in rows_of(command().out)
    with pytest.raises(ValueError, match="none of 5 prompts fits"):
        command(max_tokens=64).run(disk_target)


def test_conversations_are_asked_up_to_their_first_answer(command, disk_target, tmp_path, capsys):
    talk = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    rows = {"messages": talk}, {"conversations": [{"from": "gpt", "value": "b"}]}, {"messages": talk[:1], "tools": [1]}
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command(prompts=(str(path),)).run(disk_target) == 2
    assert "1 skipped" in capsys.readouterr().err
    answers = rows_of(command().out)
    assert answers["talks", 0]["prompt"] == answers["talks", 2]["prompt"] == disk_target.tokenizer.encode_chat("a")
    with pytest.raises(ValueError, match=r"'thinking': \(None, False\)"):
        command(prompts=(str(path),), thinking=False).run(disk_target)
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a\ud800"}]}) + "\n")
    with pytest.raises(ValueError, match="none of 1 prompts fits"):
        command(prompts=(str(path),)).run(disk_target)
    assert "1 prompts are refused" in capsys.readouterr().err
    path.write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match=r'talks\.jsonl:1 is not {"turns": \[text, \.\.\.\]} or'):
        command(prompts=(str(path),)).run(disk_target)


def test_answers_to_other_prompts_are_refused(command, disk_target, tmp_path):
    command().run(disk_target)
    write_prompts(tmp_path / "sums.jsonl", count=5, seed=9)
    with pytest.raises(ValueError, match="answers other prompts"):
        command().run(disk_target)


@pytest.mark.parametrize(
    "changed", [{"temperature": 0.5}, {"max_tokens": 11}, {"seed": 1}, {"target": "elsewhere"}], ids=str
)
def test_answers_of_other_settings_are_not_added_to(command, disk_target, changed):
    command(limit=2).run(disk_target)
    ((field, here),) = changed.items()
    there = getattr(command(), field)
    with pytest.raises(ValueError, match=r"answers\.jsonl:1 was answered with other settings") as error:
        command(**changed).run(disk_target)
    assert str({field: (there, here)}) in str(error.value)
    assert command(rows=1, max_length=60).run(disk_target) == 6


def test_answers_that_do_not_say_their_settings_are_not_added_to(command, disk_target):
    command(limit=2).run(disk_target)
    rows = rows_of(command().out).values()
    with open(command().out, "w") as file:
        file.write("".join(json.dumps({k: v for k, v in row.items() if k != "settings"}) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"'temperature': \(None, 1\.0\).*that kept no settings"):
        command().run(disk_target)


def test_two_files_of_one_name_are_refused(command, tmp_path):
    (tmp_path / "b").mkdir()
    write_prompts(tmp_path / "b" / "sums.jsonl")
    with pytest.raises(ValueError, match="share one"):
        list(interleave([*command().prompts, str(tmp_path / "b" / "sums.jsonl")]))


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"domain": "a", "prompt": [1]}', '{"domain": "a", "index": 0, "prompt": [1], "settings": 3}'],
)
def test_a_file_of_other_rows_is_refused(tmp_path, line):
    path = tmp_path / "answers.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"answers.jsonl:1 "):
        read_answers(path, {})


def test_mistakes_end_with_one_line(command, monkeypatch, capsys, tiny_directory, tmp_path):
    monkeypatch.setattr(regenerate, "cache_programs", lambda: None)
    options = ["--prompts", "missing.jsonl", "--out", str(tmp_path / "o"), "--target", str(tiny_directory)]
    monkeypatch.setattr(sys, "argv", ["regenerate", *options])
    with pytest.raises(SystemExit) as end:
        regenerate.main()
    assert end.value.code == 2 and capsys.readouterr().err.count("\n") == 1
