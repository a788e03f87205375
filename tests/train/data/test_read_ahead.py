"""Batches made ahead: the same ones, from any step on."""

import threading
from contextlib import closing

import numpy as np
import pytest

from train.data import PackedData, TokenStore, read_ahead

DATA = PackedData(TokenStore.of_flips(([i] * (i % 7 + 1), [0]) for i in range(40)), seq_len=8, batch_size=2, seed=0)


@pytest.mark.parametrize("first", [0, 3, 11])
def test_batches_are_those_of_the_pure_function(first):
    with closing(read_ahead(DATA.batch, first, 12)) as batches:
        for step in range(first, 12):
            assert batches.get_state() == {"next_index": step}
            np.testing.assert_array_equal(next(batches).tokens, DATA.batch(step).tokens)
        with pytest.raises(StopIteration):
            next(batches)


def test_batches_are_made_before_they_are_asked_for_and_elsewhere():
    made, ready = [], threading.Event()

    def make(step):
        made.append((step, threading.current_thread()))
        if step == 2:
            ready.set()
        return step

    with closing(read_ahead(make, 0, 10, ahead=2)) as batches:
        assert next(batches) == 0
        assert ready.wait(10)
    assert threading.main_thread() not in {thread for _, thread in made} and len(made) < 10


def test_a_failure_to_make_a_batch_arrives():
    def make(step):
        raise OSError("no room")

    with closing(read_ahead(make, 0, 3)) as batches, pytest.raises(OSError, match="no room"):
        next(batches)
