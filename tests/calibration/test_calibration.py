"""The calibration as a whole, and its JSON: ours, SGLang's and TensorRT-LLM's."""

import dataclasses
import json
import logging

import numpy as np
import pytest

from dspark_jax.calibration import Calibration, Scaling, calibrate, join, measure, read_calibration, write_calibration
from dspark_jax.calibration.calibration import ALL


@pytest.fixture(scope="module")
def two_domains(rounds):
    return join([rounds(8000, seed=1, domain="math"), rounds(8000, (1.2, 2.0, 1.5, 1.0), seed=2, domain="chat")])


@pytest.fixture(scope="module")
def fitted(two_domains) -> Calibration:
    return calibrate(two_domains, held_out=0.5, seed=3)


def test_every_domain_and_the_mix_are_measured_on_prompts_held_out(two_domains, fitted):
    assert list(fitted.measures) == [ALL, "math", "chat"]
    before, after = fitted.measures[ALL]
    # Readers that know temperatures only are told what these do.
    alone = measure(two_domains.split(0.5, 3)[1], Scaling(fitted.temperatures))
    assert fitted.ece_before == tuple(before.ece) and fitted.ece_after == tuple(alone.ece)
    assert after.mean_ece < before.mean_ece
    assert fitted.num_samples + before.rounds[0] == len(two_domains)
    assert sum(fitted.measures[d][0].rounds[0] for d in ("math", "chat")) == before.rounds[0]
    for before, after in fitted.measures.values():
        np.testing.assert_array_equal(before.confidence_auc, after.confidence_auc)
        assert ((before.confidence_auc > 0.6) & (before.confidence_auc < 0.95)).all()
    assert fitted.dataset == "math+chat" and fitted.drafter == "d0"
    assert fitted.split is not None and (fitted.split.prompts_fitted, fitted.split.prompts_measured) == (400, 400)


def test_tiny_positions_are_told(rounds, caplog):
    n = 2000
    with caplog.at_level(logging.WARNING):
        found = calibrate(rounds(n, lengths=np.full(n, 2)))
    assert len(found.warnings) == len(caplog.records) == 2 and "position 3" in caplog.text
    assert found.temperatures[2:] == (1.0, 1.0)
    assert len(found.ece_before) == len(found.ece_after) == 2


def test_a_drafter_without_confidence_head_is_refused(rounds):
    records = rounds(100)
    records.confidence_logits[:] = np.inf
    with pytest.raises(ValueError, match="no confidence head"):
        calibrate(records)


def test_all_zero_confidences_are_measured(rounds):
    records = rounds(1000)
    records.confidence_logits[:] = -np.inf
    found = calibrate(records)
    assert found.temperatures == (1.0,) * 4
    np.testing.assert_allclose(found.ece_after, found.measures[ALL][0].observed)


def test_json_gives_back_what_was_written(fitted, rounds, tmp_path):
    path = tmp_path / "new" / "sts.json"
    few = rounds(2000, lengths=np.full(2000, 2))
    for calibration in (fitted, calibrate(few, shifts=False), calibrate(few), Calibration((1.5, 2.0))):
        write_calibration(path, calibration)
        found = read_calibration(path)
        for field in dataclasses.fields(Calibration):
            if field.name != "measures":
                assert getattr(found, field.name) == getattr(calibration, field.name), field.name
        assert found.measures.keys() == calibration.measures.keys()
        for name, pair in calibration.measures.items():
            for ours, theirs in zip(pair, found.measures[name], strict=True):
                for field in dataclasses.fields(ours):
                    np.testing.assert_array_equal(getattr(ours, field.name), getattr(theirs, field.name))
    assert [p.name for p in path.parent.iterdir()] == ["sts.json"]


def test_what_is_written_has_the_types_that_sglang_decodes(rounds, tmp_path):
    """Its reader is strict about these five keys, and ignores others."""
    path = tmp_path / "sts.json"
    write_calibration(path, calibrate(rounds(2000, lengths=np.full(2000, 2))))
    value = json.loads(path.read_text())
    for key in ("temperatures", "ece_before", "ece_after"):
        assert value[key] and all(type(x) is float for x in value[key])
    assert type(value["dataset"]) is str and type(value["num_samples"]) is int
    # TensorRT-LLM reads either name of the temperatures; a file with both could disagree with itself.
    assert "sts_temperatures" not in value and "NaN" not in path.read_text()


def test_servers_that_know_no_shifts_read_temperatures_fitted_without(rounds, tmp_path):
    records, path = rounds(4000), tmp_path / "sts.json"
    records = dataclasses.replace(records, confidence_logits=records.confidence_logits + np.float32(1))
    alone, known = calibrate(records, shifts=False), calibrate(records)
    write_calibration(path, known)
    assert json.loads(path.read_text())["temperatures"] == list(alone.temperatures)
    found = read_calibration(path).scaling_for(4)
    assert found == known.platt and found.shifts[0] < -0.4 and found.temperatures != alone.temperatures
    assert known.ece_after == alone.ece_after and known.measures[ALL][1].ece[0] < known.ece_after[0]


@pytest.mark.parametrize(
    ("text", "ece"),
    [
        ('{"temperatures": [1.5, 2], "dataset": "x", "num_samples": 7, "ece_before": [0.1, 0.2]}', (0.1, 0.2)),
        ('{"temperatures": [1.5, 2.0]}', ()),
        ('{"sts_temperatures": [1.5, 2.0], "max_draft_len": 2, "ece_before": 0.1, "dataset": null}', (0.1,)),
        ('{"sts_temperatures": [1.5, 2.0], "temperatures": [1.5, 2.0], "ece_before": null}', ()),
    ],
)
def test_calibrations_of_other_engines_are_read(tmp_path, text, ece):
    path = tmp_path / "sts.json"
    path.write_text(text)
    found = read_calibration(path)
    assert found.temperatures == (1.5, 2.0) and found.ece_before == ece and found.drafter == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not whole JSON"),
        ("[1.5]", "expected an object"),
        ("{}", "it has none of temperatures, sts_temperatures; it holds nothing"),
        ('{"temps": [1]}', "it holds temps"),
        ('{"temperatures": []}', "at least one temperature"),
        ('{"temperatures": [1.0, 0.0]}', "positive and finite"),
        ('{"temperatures": [1.0, -2]}', "positive and finite"),
        ('{"temperatures": [NaN]}', "positive and finite"),
        ('{"temperatures": [Infinity]}', "positive and finite"),
        ('{"temperatures": [null]}', "temperatures must be numbers"),
        ('{"temperatures": ["1.0"]}', "temperatures must be numbers"),
        ('{"temperatures": [true]}', "temperatures must be numbers"),
        ('{"temperatures": [1.0], "sts_temperatures": [2.0]}', "disagree"),
        ('{"temperatures": [1.0], "num_samples": "many"}', "num_samples must be int"),
        ('{"temperatures": [1.0], "split": {"by": 3}}', "is not a calibration"),
        ('{"temperatures": [1.0], "measures": {"a": {}}}', "is not a calibration"),
        ('{"temperatures": [1.0], "measures": [1]}', "is not a calibration"),
        ('{"temperatures": [1.0], "platt": {"temperatures": [1.0, 2.0], "shifts": [0.0, 1.0]}}', "holds 2 positions"),
        ('{"temperatures": [1.0], "platt": {"temperatures": [1.0], "shifts": [0.0, 1.0]}}', "expected 1 shifts"),
        ('{"temperatures": [1.0], "platt": [1.0]}', "is not a calibration"),
    ],
)
def test_files_that_are_no_calibration_are_refused(tmp_path, text, message):
    path = tmp_path / "sts.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        read_calibration(path)
    assert "sts.json" in str(raised.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="dspark calibrate"):
        read_calibration(tmp_path / "sts.json")


def test_temperatures_go_with_their_drafter_and_any_shorter_block():
    known = Calibration((1.5, 2.0, 0.5), drafter="abc")
    assert known.scaling_for(3, "abc") == known.scaling
    assert known.scaling_for(2) == Scaling((1.5, 2.0))
    assert hash(known.scaling_for(1))
    with pytest.raises(ValueError, match="fitted for drafter abc, this one is xyz"):
        known.scaling_for(2, "xyz")
    with pytest.raises(ValueError, match="3 temperatures for 4 draft positions"):
        known.scaling_for(4, "abc")
    assert Calibration((1.0,)).scaling_for(1, "xyz") == Scaling((1.0,))
