"""Documents, their packing and the draft vocabulary."""

import json

import numpy as np
import pytest

from train.data import PackedData, frequent_tokens, read_documents

DRAW = np.random.default_rng(0)
DOCUMENTS = [(DRAW.integers(100, size=int(n)).astype(np.int32), int(n) // 3) for n in DRAW.integers(1, 70, size=40)]


def test_every_token_stands_once_in_an_epoch():
    data = PackedData(DOCUMENTS, seq_len=32, batch_size=1, seed=0)
    for epoch in (0, 1):
        seen = np.zeros(sum(len(t) for t, _ in DOCUMENTS), int)
        starts = np.cumsum([0, *(len(t) for t, _ in DOCUMENTS)])
        for row in data._rows(epoch):
            assert sum(piece.count for piece in row) <= 32
            for piece in row:
                start = starts[piece.document] + piece.first
                seen[start : start + piece.count] += 1
        assert (seen == 1).all()


def test_a_batch_holds_its_pieces():
    data = PackedData(DOCUMENTS, seq_len=32, batch_size=4, seed=0)
    batch, rows = data.batch(3), data.pieces(3)
    for r, row in enumerate(rows):
        at = 0
        for number, (document, first, count) in enumerate(row):
            tokens, answer = DOCUMENTS[document]
            here = slice(at, at + count)
            np.testing.assert_array_equal(batch.tokens[r, here], tokens[first : first + count])
            np.testing.assert_array_equal(batch.positions[r, here], range(count))
            np.testing.assert_array_equal(batch.supervised[r, here], np.arange(first, first + count) >= answer)
            assert (batch.segments[r, here] == number).all()
            at += count
        assert (batch.segments[r, at:] == -1).all() and not batch.supervised[r, at:].any()


def test_order_depends_on_seed_and_step_only():
    data, again = (PackedData(DOCUMENTS, 32, 4, seed=1) for _ in "ab")
    late = [again.pieces(step) for step in reversed(range(30))][::-1]
    assert late == [data.pieces(step) for step in range(30)]
    assert data.pieces(0) != data.pieces(data.steps_per_epoch)
    assert data.pieces(0) != PackedData(DOCUMENTS, 32, 4, seed=2).pieces(0)


def test_checksum_sees_tokens_boundaries_and_answers():
    base = [(np.array([1, 2, 3], np.int32), 1), (np.array([4], np.int32), 0)]
    others = [
        [(np.array([1, 2, 5], np.int32), 1), base[1]],
        [(np.array([1, 2], np.int32), 1), (np.array([3, 4], np.int32), 0)],
        [(base[0][0], 2), base[1]],
    ]
    checksums = {PackedData(documents, 8, 1, 0).crc for documents in (base, *others)}
    assert len(checksums) == 4


def test_frequent_tokens():
    documents = [(np.array([9, 9, 9, 5, 5, 7, 1, 1]), 3)]
    assert frequent_tokens(documents, 3, always=[0]).tolist() == [0, 1, 5]
    assert frequent_tokens(documents, 6, always=[]).tolist() == [0, 1, 2, 3, 5, 7]


BAD = [
    "{",
    "[1]",
    '{"prompt": [1]}',
    '{"prompt": ["a"], "answer": []}',
    '{"prompt": "12", "answer": "34"}',
    '{"prompt": [1], "answer": [1.7]}',
    '{"prompt": [], "answer": []}',
    '{"prompt": [[1, 2]], "answer": [[3, 4]]}',
    '{"prompt": [1], "answer": [-5]}',
    '{"prompt": [1], "answer": [40]}',
    '{"prompt": [1099511627776], "answer": [1]}',
]


@pytest.mark.parametrize("line", BAD)
def test_a_bad_row_names_its_line(tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": [1], "answer": [39]}) + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match=r"data.jsonl:3 "):
        read_documents([path], vocab_size=40)


def test_no_documents(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="no documents"):
        read_documents([tmp_path / "empty.jsonl"], vocab_size=40)
