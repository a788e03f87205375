"""Records: what counts as verified, what is censored, and files that are not records."""

import dataclasses

import numpy as np
import pytest

from dspark_jax import Generation, Request
from dspark_jax.calibration import join, read_records, record_rounds, write_records

STOP = 9


def generation(drafts, scheduled, accepted) -> Generation:
    drafts, accepted = np.array(drafts, np.int32).reshape(-1, 3), np.array(accepted)
    logits = np.arange(drafts.size, dtype=np.float32).reshape(drafts.shape)
    return Generation([], "stop", accepted + 1, accepted, np.array(scheduled), logits, drafts)


def test_what_stands_behind_a_drafted_stop_is_censored_also_where_it_was_not_reached():
    blocks = [[1, 2, 3], [1, STOP, 3], [1, STOP, 3], [STOP, 2, 3], [1, 2, 3]]
    one = generation(blocks, scheduled=[3, 3, 2, 3, 1], accepted=[1, 0, 2, 0, 1])
    records = record_rounds([one], [Request([5])], domain="a", stop_ids=[STOP])
    assert records.scheduled.tolist() == [3, 2, 2, 1, 1] and records.accepted.tolist() == [1, 0, 2, 0, 1]
    assert records.verified.sum(1).tolist() == [3, 2, 2, 1, 1]
    assert records.at_risk.sum(1).tolist() == [2, 1, 2, 1, 1]
    assert records.survived.sum(1).tolist() == records.accepted.tolist()


def test_a_request_decides_which_ids_stop():
    one = generation([[1, STOP, 4]], scheduled=[3], accepted=[0])
    scheduled = lambda request: record_rounds([one], [request], domain="a", stop_ids=[STOP]).scheduled.tolist()  # noqa: E731
    assert scheduled(Request([5])) == [2]
    assert scheduled(Request([5], ignore_eos=True)) == [3]
    assert scheduled(Request([5], ignore_eos=True, stop_ids=[1])) == [1]


def test_a_prompt_has_one_number_in_every_domain_and_temperature():
    one = generation([[1, 2, 3]], [3], [0])
    make = lambda prompt, t, domain: record_rounds([one], [Request(prompt, temperature=t)], domain=domain, stop_ids=[])  # noqa: E731
    a, b, c = make([1, 2], 0.0, "a"), make(np.array([1, 2], np.int32), 1.0, "b"), make([1, 2, 0], 0.0, "a")
    assert a.prompt[0] == b.prompt[0] != c.prompt[0]
    joined = join([a, b, c])
    assert joined.domains == ("a", "b") and joined.domain.tolist() == [0, 1, 0] and joined.temperature[1] == 1


def test_nothing_to_record():
    with pytest.raises(ValueError, match="no rounds"):
        record_rounds([generation([], [], [])], [Request([1])], domain="a", stop_ids=[])
    plain = dataclasses.replace(generation([], [], []), drafts=np.zeros((2, 0), int))
    with pytest.raises(ValueError, match="plain decoding"):
        record_rounds([plain], [Request([1])], domain="a", stop_ids=[])


def test_a_split_shares_no_prompt_and_takes_from_every_domain(rounds):
    records = join([rounds(2000, seed=1, domain="a"), rounds(200, seed=2, domain="b")])
    fitted, measured = records.split(0.3, seed=5)
    assert not set(fitted.prompt) & set(measured.prompt) and len(fitted) + len(measured) == len(records)
    for name, prompts in (("a", 100), ("b", 10)):
        assert len(np.unique(measured.of_domain(name).prompt)) == 0.3 * prompts
    again = records.split(0.3, seed=5)[1]
    np.testing.assert_array_equal(measured.confidence_logits, again.confidence_logits)
    assert not np.array_equal(measured.prompt, records.split(0.3, seed=6)[1].prompt)


def test_a_split_leaves_a_prompt_on_both_sides_or_refuses(rounds):
    two = rounds(40)
    for share in (0.01, 0.99):
        assert [len(part) for part in two.split(share)] == [20, 20]
    with pytest.raises(ValueError, match="domain 'a' has 1 prompt"):
        rounds(20).split(0.5)
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match="held_out must be"):
            two.split(share)


def test_domains_are_picked_by_name(rounds):
    records = join([rounds(10, seed=1, domain="a"), rounds(20, seed=2, domain="b")])
    assert len(records.of_domain("b")) == 20 and len(records.of_domain("a", "b")) == 30
    with pytest.raises(ValueError, match="no domain 'c'"):
        records.of_domain("a", "c")


def test_only_rounds_of_one_drafter_are_joined(rounds):
    with pytest.raises(ValueError, match="calibrate each drafter by itself"):
        join([rounds(10), dataclasses.replace(rounds(10), drafter="other")])
    with pytest.raises(ValueError, match="3 drafts a block"):
        join([rounds(10), rounds(10, (1.0,) * 3)])
    with pytest.raises(ValueError, match="at least one"):
        join([])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"confidence_logits": np.full((2, 4), np.nan, np.float32)}, "2 of 2 rounds have a confidence that is NaN"),
        ({"confidence_logits": np.zeros((2, 0), np.float32)}, r"must be \[rounds, drafts\]"),
        ({"accepted": np.array([5, 0])}, "accepted <= scheduled <= 4"),
        ({"scheduled": np.array([5, 4])}, "accepted <= scheduled <= 4"),
        ({"accepted": np.array([-1, 0])}, "0 <= accepted"),
        ({"prompt": np.zeros(3, int)}, "prompt must have one value a round"),
        ({"domain": np.array([0, 1])}, "domain must be within"),
    ],
)
def test_values_that_cannot_be_are_refused(rounds, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(rounds(2), **change)


def test_files_give_back_what_was_written(rounds, tmp_path):
    records = join([rounds(50, seed=1, domain="a"), rounds(50, seed=2, domain="b ä")])
    path = tmp_path / "new" / "r.npz"
    write_records(path, records)
    found = read_records(path)
    for field in dataclasses.fields(records):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(records, field.name))
    assert [p.name for p in path.parent.iterdir()] == ["r.npz"]


def test_files_that_are_no_records_are_refused(rounds, tmp_path):
    path = tmp_path / "r.npz"
    with pytest.raises(FileNotFoundError, match="--records"):
        read_records(path)
    path.write_bytes(b"PK no zip")
    with pytest.raises(ValueError, match=r"r\.npz is not a whole \.npz"):
        read_records(path)
    write_records(path, rounds(50))
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match="not a whole"):
        read_records(path)
    np.savez(path, logits=np.zeros(3))
    with pytest.raises(ValueError, match="lacks confidence_logits"):
        read_records(path)
    write_records(path, rounds(2))
    arrays = dict(np.load(path))
    np.savez(path, **{**arrays, "accepted": np.array([7, 7])})
    with pytest.raises(ValueError, match=r"r\.npz: expected 0 <= accepted"):
        read_records(path)
