"""Rows of packed documents and their order."""

import numpy as np
import pytest

from train.data import PackedData, Piece, TokenStore, first_fit

DRAW = np.random.default_rng(0)
DOCUMENTS = TokenStore.of(
    (DRAW.integers(100, size=n), DRAW.random(n) < 0.5) for n in DRAW.integers(1, 70, size=40).tolist()
)


def test_every_token_stands_once_in_an_epoch():
    data = PackedData(DOCUMENTS, seq_len=32, batch_size=1, seed=0)
    for epoch in (0, 1):
        seen = np.zeros(sum(len(t) for t, _ in DOCUMENTS), int)
        starts = np.cumsum([0, *(len(t) for t, _ in DOCUMENTS)])
        pieces, ends = data._rows(epoch)
        for row in np.split(pieces, ends[:-1]):
            assert row[:, 2].sum() <= 32
            for document, first, count in row:
                seen[starts[document] + first : starts[document] + first + count] += 1
        assert (seen == 1).all()


def test_a_batch_holds_its_pieces():
    data = PackedData(DOCUMENTS, seq_len=32, batch_size=4, seed=0)
    batch, rows = data.batch(3), data.pieces(3)
    for r, row in enumerate(rows):
        at = 0
        for number, (document, first, count) in enumerate(row):
            tokens, mask = DOCUMENTS[document]
            here = slice(at, at + count)
            np.testing.assert_array_equal(batch.tokens[r, here], tokens[first : first + count])
            np.testing.assert_array_equal(batch.positions[r, here], range(count))
            np.testing.assert_array_equal(batch.supervised[r, here], mask[first : first + count])
            assert (batch.segments[r, here] == number).all()
            at += count
        assert (batch.segments[r, at:] == -1).all() and not batch.supervised[r, at:].any()


def test_order_depends_on_seed_and_step_only():
    data, again = (PackedData(DOCUMENTS, 32, 4, seed=1) for _ in "ab")
    late = [again.pieces(step) for step in reversed(range(30))][::-1]
    assert late == [data.pieces(step) for step in range(30)]
    assert data.pieces(0) != data.pieces(data.steps_per_epoch)
    assert data.pieces(0) != PackedData(DOCUMENTS, 32, 4, seed=2).pieces(0)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_the_rows_of_the_same_batches(processes):
    data = PackedData(DOCUMENTS, seq_len=32, batch_size=4, seed=0)
    for step in (0, 5, data.steps_per_epoch):
        parts = [data.batch(step, p, processes) for p in range(processes)]
        assert all(part.tokens.shape == (4 // processes, 32) for part in parts)
        for name in ("tokens", "supervised", "positions", "segments"):
            joined = np.concatenate([getattr(part, name) for part in parts])
            np.testing.assert_array_equal(joined, getattr(data.batch(step), name))


@pytest.mark.parametrize(("process", "processes"), [(0, 3), (0, 8), (2, 2), (-1, 2)])
def test_rows_that_cannot_be_shared_are_refused(process, processes):
    data = PackedData(DOCUMENTS, seq_len=32, batch_size=4, seed=0)
    with pytest.raises(ValueError, match="batch_size 4 is not shared equally"):
        data.batch(0, process, processes)


def test_first_fit_takes_the_first_open_row_with_room():
    counts = [5, 6, 3, 8, 2, 4, 1]
    pieces = [Piece(i, 0, count) for i, count in enumerate(counts)]
    documents = lambda open_rows: [[p.document for p in row] for row in first_fit(pieces, 8, open_rows)]  # noqa: E731
    assert documents(32) == [[0, 2], [1, 4], [3], [5, 6]]
    assert documents(2) == [[0, 2], [1, 4], [3], [5, 6]]
    assert documents(1) == [[0], [1], [2], [3], [4, 5, 6]]
    assert first_fit([], 8) == []


def test_efficiency_is_the_share_of_places_that_hold_tokens():
    data = PackedData(DOCUMENTS, seq_len=32, batch_size=4, seed=0)
    rows = len(data._rows(0)[1])
    batch = PackedData(DOCUMENTS, seq_len=32, batch_size=rows, seed=0).batch(0)
    assert 0.8 < data.efficiency == np.mean(batch.segments >= 0) < 1
