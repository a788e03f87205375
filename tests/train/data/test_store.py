"""Documents in flat arrays: their masks, checksum and frequent tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.data import TokenStore, frequent_tokens
from train.data.store import flips_of, mask_of

DRAW = np.random.default_rng(0)
DOCUMENTS = [(DRAW.integers(50, size=n).astype(np.int32), DRAW.random(n) < 0.6) for n in (1, 9, 3, 30, 2, 17)]


def test_documents_come_back():
    store = TokenStore.of(DOCUMENTS)
    assert len(store) == 6 and store.lengths.tolist() == [1, 9, 3, 30, 2, 17]
    for (tokens, supervised), (ids, mask) in zip(store, DOCUMENTS, strict=True):
        np.testing.assert_array_equal(tokens, ids)
        np.testing.assert_array_equal(supervised, mask)
    assert [len(tokens) for tokens, _ in store[-2:]] == [2, 17]
    assert store[-1].tokens.tolist() == DOCUMENTS[-1][0].tolist()
    with pytest.raises(IndexError):
        store[6]
    assert len(TokenStore.of([])) == 0 and not len(TokenStore.of([]).lengths)


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_a_mask_is_its_flips(mask):
    assert mask_of(flips_of(np.array(mask)), len(mask)).tolist() == mask


@pytest.mark.parametrize("block", [1, 2, 4, 100])
def test_supervised_tokens_of_any_number_of_documents_at_a_time(block):
    found = np.concatenate(list(TokenStore.of(DOCUMENTS).supervised_blocks(block)))
    assert found.tolist() == np.concatenate([tokens[mask] for tokens, mask in DOCUMENTS]).tolist()


def test_an_answer_of_no_tokens_supervises_nothing():
    store = TokenStore.of_flips([([1, 2], [2]), ([3, 4], [0])])
    assert [list(mask) for _, mask in store] == [[False, False], [True, True]]
    assert np.concatenate(list(store.supervised_blocks())).tolist() == [3, 4]


def test_checksum_sees_tokens_boundaries_and_answers():
    one, two = np.arange(3) >= 1, np.ones(1, bool)
    base = [([1, 2, 3], one), ([4], two)]
    others = [
        [([1, 2, 5], one), base[1]],
        [([1, 2], one[:2]), ([3, 4], np.ones(2, bool))],
        [([1, 2, 3], np.arange(3) >= 2), base[1]],
        [([1, 2, 3], np.arange(3) == 1), base[1]],
    ]
    assert len({TokenStore.of(documents).crc for documents in (base, *others)}) == 5


def test_frequent_tokens():
    store = TokenStore.of([([9, 9, 9, 5, 5, 7, 1, 1], np.arange(8) >= 3)])
    assert frequent_tokens(store, 3, always=[0]).tolist() == [0, 1, 5]
    assert frequent_tokens(store, 6, always=[]).tolist() == [0, 1, 2, 3, 5, 7]
