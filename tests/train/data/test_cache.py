"""Tokens on disk: the same as in memory, after a kill too, and refused where they are of something else."""

import gzip
import json
import os
import threading

import numpy as np
import pytest

from train.data import ChatOptions, PackedData, RowReader, cache, cached_documents, read_documents

ROWS = [
    *(
        {"messages": [{"role": r, "content": f"{r} {i}"} for r in ("user", "assistant") * (1 + i % 3)]}
        for i in range(30)
    ),
    {"messages": [{"role": "system", "content": "x"}, {"role": "assistant", "content": "y"}]},
    {"messages": [{"role": "user", "content": "x"}]},
    {"prompt": [1, 2], "answer": [3]},
]


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "data.jsonl", ROWS)


@pytest.fixture
def reader(chat):
    return RowReader(chat("no system"), 300, ChatOptions())


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def assert_same(store, other):
    for name in ("tokens", "ends", "flips", "flip_ends"):
        np.testing.assert_array_equal(getattr(store, name), getattr(other, name), err_msg=name)
    assert store.crc == other.crc


def test_the_cache_holds_what_reading_gives(tmp_path, data, reader):
    plain = read_documents([data], reader)
    store, counts = cached_documents(tmp_path / "tokens", [data], reader)
    assert_same(store, plain)
    assert isinstance(store.tokens, np.memmap)
    assert (counts.rows, counts.documents, counts.tokens) == (33, 31, len(plain.tokens))
    assert counts.supervised == sum(mask.sum() for _, mask in plain)
    assert counts.skipped == {
        "the chat template refuses these messages: no system role": (1, f"{data}:31"),
        "no assistant turn": (1, f"{data}:32"),
    }
    assert f"\nskipped 1: no assistant turn (first: {data}:32)" in str(counts)
    batches = [PackedData(documents, 32, 2, seed=0).batch(7) for documents in (store, plain)]
    np.testing.assert_array_equal(batches[0].supervised, batches[1].supervised)


def test_what_is_there_is_not_made_again(tmp_path, data, reader, monkeypatch):
    first = cached_documents(tmp_path / "tokens", [data], reader)
    monkeypatch.setattr(RowReader, "read", None)
    again = cached_documents(tmp_path / "tokens", [data], reader)
    assert_same(again[0], first[0])
    assert again[1] == first[1]


@pytest.mark.parametrize("dies_at", [2, 5, 8])
def test_a_killed_pass_goes_on_where_it_stopped(tmp_path, data, reader, monkeypatch, dies_at):
    monkeypatch.setattr(cache, "CHUNK", 1)
    read, asked = RowReader.read, []

    def killed(self, rows):
        asked.append(rows[0][0])
        if len(asked) == 16 + dies_at:
            raise KeyboardInterrupt
        return read(self, rows)

    monkeypatch.setattr(RowReader, "read", killed)
    with pytest.raises(KeyboardInterrupt):
        cached_documents(tmp_path / "tokens", [data], reader)
    # What a kill may leave behind the last commit.
    with open(tmp_path / "tokens" / "tokens.i4", "ab") as file:
        file.write(b"half")
    asked.clear()
    monkeypatch.setattr(RowReader, "read", lambda self, rows: asked.append(rows[0][0]) or read(self, rows))
    store, counts = cached_documents(tmp_path / "tokens", [data], reader)
    assert asked == [f"{data}:{n}" for n in range(17, 34)]
    monkeypatch.undo()
    whole = cached_documents(tmp_path / "whole", [data], reader)
    assert_same(store, whole[0])
    assert counts == whole[1]


def test_rows_and_files_that_are_added_are_tokenised_alone(tmp_path, reader, monkeypatch):
    data, more = write(tmp_path / "data.jsonl", ROWS[:20]), write(tmp_path / "more.jsonl", ROWS[5:9])
    cached_documents(tmp_path / "tokens", [data], reader)
    write(data, ROWS)
    read, asked = RowReader.read, []
    monkeypatch.setattr(RowReader, "read", lambda self, rows: asked.extend(p for p, _ in rows) or read(self, rows))
    store, _ = cached_documents(tmp_path / "tokens", [data, more], reader)
    assert asked == [*(f"{data}:{n}" for n in range(21, 34)), *(f"{more}:{n}" for n in range(1, 5))]
    assert_same(store, read_documents([data, more], reader))
    with pytest.raises(
        ValueError, match=r"tokens of 'more\.jsonl', which is not there as it was: no such file is given"
    ):
        cached_documents(tmp_path / "tokens", [data], reader)
    write(data, [*ROWS, *ROWS])
    with pytest.raises(ValueError, match=r"tokens of 'data\.jsonl', which is not there as it was: .* is another"):
        cached_documents(tmp_path / "tokens", [data, more], reader)


def test_tokens_of_something_else_are_refused(tmp_path, data, reader, chat):
    cached_documents(tmp_path / "tokens", [data], reader)
    for other, field in (
        (RowReader(chat("plain"), 300, ChatOptions()), "template"),
        (RowReader(None, 300, ChatOptions()), "tokenizer"),
        (RowReader(chat("no system"), 300, ChatOptions(thinking=False)), r"chat\.thinking': \(None, False\)"),
        (RowReader(chat("no system"), 300, ChatOptions(turns="last")), r"chat\.turns"),
    ):
        with pytest.raises(ValueError, match=rf"tokens made otherwise .*{field}.*Delete it"):
            cached_documents(tmp_path / "tokens", [data], other)
    with pytest.raises(ValueError, match=r"holds the token id \d+, the target has 0\.\.99"):
        cached_documents(tmp_path / "tokens", [data], RowReader(chat("no system"), 100, ChatOptions()))
    changed = [*ROWS[:3], {"prompt": [1, 2], "answer": [4]}, *ROWS[4:]]
    with pytest.raises(ValueError, match="is another"):
        cached_documents(tmp_path / "tokens", [write(data, changed)], reader)


@pytest.mark.parametrize("name", ["tokens.i4", "ends.i8", "flips.i4", "flip_ends.i8", "note.json"])
def test_damaged_tokens_are_refused(tmp_path, data, reader, name):
    cached_documents(tmp_path / "tokens", [data], reader)
    path = tmp_path / "tokens" / name
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(ValueError, match=r"is no note of tokens|cut short; delete it"):
        cached_documents(tmp_path / "tokens", [data], reader)


def test_files_without_a_usable_row_are_refused_with_the_reasons(tmp_path, reader):
    (tmp_path / "empty.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROWS[31]).encode()))
    with pytest.raises(ValueError, match=r"no documents in .*1 rows: 0 documents.*; skipped 1: no assistant turn"):
        cached_documents(tmp_path / "tokens", [tmp_path / "empty.jsonl.gz"], reader)


def test_a_second_process_waits_for_the_first(tmp_path, data, reader, monkeypatch):
    read, passes = RowReader.read, []
    monkeypatch.setattr(RowReader, "read", lambda self, rows: passes.append(1) or read(self, rows))
    with cache.locked(tmp_path / "lock"):
        found = []
        waits = threading.Thread(target=lambda: found.append(cached_documents(tmp_path, [data], reader)))
        waits.start()
        waits.join(0.3)
        assert not passes and not found
    waits.join(10)
    assert len(passes) == len(found) == 1
