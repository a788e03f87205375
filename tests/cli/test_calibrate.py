"""`dspark evaluate --records`, and `dspark calibrate` on what it wrote."""

import json
import re

import numpy as np
import pytest

from dspark_jax.calibration import Records, drafter_fingerprint, read_calibration, read_records, write_records
from dspark_jax.cli import main
from dspark_jax.scheduling import CostTable, Stairs, StepCosts


def write(path, domains=("math", "chat"), n=2000):
    random = np.random.default_rng(0)
    z = random.normal(1, 1.5, (n, 3))
    accepted = np.cumprod(random.random((n, 3)) < 1 / (1 + np.exp(-z)), axis=1).sum(1)
    number = np.arange(n)
    records = Records(
        (2 * z).astype(np.float32), np.full(n, 3), accepted, number // 10, number // 10 % len(domains),
        number // 10 % 2, domains, "d0",
    )  # fmt: skip
    write_records(path, records)


def test_it_prints_tables_and_writes_temperatures_and_a_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    records, out, picture = (str(tmp_path / name) for name in ("r.npz", "sts.json", "r.png"))
    write(records)
    main(["calibrate", records, "--out", out, "--plot", picture, "--drift", "--minimum", "30", "--no-shifts"])
    text = capsys.readouterr().out
    for words in ("all domains, prompts held out", "math, prompts held out", "chat, prompts held out", "fitted on"):
        assert words in text
    known = read_calibration(out)
    assert len(known.temperatures) == 3 and known.drafter == "d0" and (tmp_path / "r.png").stat().st_size > 10_000
    main(["calibrate", records, "--check", out, "--temperature", "1"])
    text = capsys.readouterr().out
    assert "on all rounds" in text and " ".join(f"{t:.3f}" for t in known.temperatures) in text
    assert "1000" in text and "math" not in text, "prompts of temperature 1 are those of chat"
    main(["calibrate", records, "--out", out, "--drift", "--minimum", "30"])
    platt = read_calibration(out).platt
    assert platt is not None and "with shifts: temperatures" in (text := capsys.readouterr().out)
    assert " ".join(f"{b:.3f}" for b in platt.shifts) in text
    main(["calibrate", records, "--check", out])
    text = capsys.readouterr().out
    assert " ".join(f"{b:.3f}" for b in platt.shifts) in text
    assert " ".join(f"{t:.3f}" for t in read_calibration(out).temperatures) in text
    main(["calibrate", records, "--check", out, "--no-shifts"])
    assert "with shifts" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["calibrate", records, "--check", out, "--drift"])


def test_drift_is_priced_by_a_cost_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    records, costs = str(tmp_path / "r.npz"), str(tmp_path / "costs.json")
    write(records)
    buckets = tuple(range(4, 17))
    step = StepCosts((Stairs(4, buckets, tuple(0.02 + 0.004 * n for n in buckets), 0.002),))
    CostTable(((512, step),)).save(costs)
    narrow = str(tmp_path / "narrow.json")
    CostTable(((512, StepCosts((Stairs(4, (4, 8), (0.1, 0.2)),))),)).save(narrow)
    options = ["--no-shifts", "--minimum", "30", "--out", str(tmp_path / "sts.json")]
    args = ["calibrate", records, "--drift", *options, "--costs", costs]
    picture = tmp_path / "drift.png"
    main([*args, "--requests", "4", "--drift-plot", str(picture)])
    assert picture.stat().st_size > 10_000
    said = capsys.readouterr().out
    rows = said.split("4 requests side by side")[1].split("no fit")[1].splitlines()
    raw, math = (re.findall(r"([+-]\d+\.\d)%", row) for row in rows[:2])
    assert math[0] == "+0.0" and float(raw[0]) > 0, "boasting confidences verify what does not pay"
    for wrong, message in (
        ([*args, "--requests", "5"], "covers steps of up to 4 requests"),
        ([*args, "--requests", "0"], "at least 1, got 0"),
        ([*args[:-1], narrow, "--requests", "4"], "ends at 8 tokens for 4 requests, 16"),
        (["calibrate", records, "--costs", costs], "pass --drift"),
    ):
        with pytest.raises(SystemExit):
            main(wrong)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "expected at least one file of records"),
        (["nowhere.npz"], "nowhere.npz does not exist"),
        (["r.npz", "--temperature", "0.5"], "no rounds were sampled at temperature 0.5"),
        (["r.npz", "--drift"], "at least two domains"),
        (["r.npz", "--held-out", "1"], "held_out must be"),
        (["r.npz", "--bins", "0"], "bins must be 1 or more"),
        (["r.npz", "--check", "nowhere.json"], "nowhere.json does not exist"),
    ],
)
def test_mistakes_end_with_exit_code_2_and_a_message(args, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "r.npz", domains=("math",))
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", *args])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_evaluate_records_every_round(golden, tmp_path, monkeypatch):
    monkeypatch.setattr("dspark_jax.cli.models.cache_programs", lambda: None)
    monkeypatch.setattr("dspark_jax.cli.evaluate.prompt_ids", lambda _, text: [1 + ord(c) % 30 for c in text])
    directory = golden("qwen3_dspark_markov").directory
    files = [tmp_path / "math.jsonl", tmp_path / "chat.jsonl"]
    for path, texts in zip(files, ("ab", "bcd"), strict=True):
        path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    models = ["--target", str(directory / "target"), "--drafter", str(directory / "draft")]
    records = tmp_path / "r.npz"
    main(["evaluate", *map(str, files), *models, "--max-tokens", "12", "--rows", "2", "--records", str(records)])
    found = read_records(records)
    assert found.domains == ("math", "chat") and set(found.temperature) == {0, 1} and len(set(found.prompt)) == 4
    assert found.block_size == golden("qwen3_dspark_markov").drafter.config.block_size
    assert found.drafter == drafter_fingerprint(golden("qwen3_dspark_markov").drafter)
    for temperature in (0, 1):
        part = found.where(found.temperature == temperature)
        assert set(part.of_domain("math").prompt) & set(part.of_domain("chat").prompt), "both hold the prompt b"


@pytest.mark.slow
def test_rounds_of_the_default_models_are_recorded_and_calibrated(tmp_path, capsys):
    prompts = {"math": ["What is 17 * 24?", "Add 3 and 4."], "chat": ["Name a colour.", "Greet me."]}
    files = {domain: tmp_path / f"{domain}.jsonl" for domain in prompts}
    for domain, path in files.items():
        path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in prompts[domain]))
    records, out = (str(tmp_path / name) for name in ("r.npz", "sts.json"))
    options = ["--max-tokens", "24", "--temperatures", "0", "1", "--rows", "4", "--records", records]
    main(["evaluate", *map(str, files.values()), *options])
    found = read_records(records)
    assert found.domains == ("math", "chat") and set(found.temperature) == {0, 1} and len(set(found.prompt)) == 4
    assert np.isfinite(found.confidence_logits).all() and found.accepted.any()
    main(["calibrate", records, "--out", out, "--minimum", "5"])
    assert read_calibration(out).drafter == found.drafter
