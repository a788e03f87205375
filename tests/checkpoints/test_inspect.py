"""`dspark inspect`: what it says, and how it ends."""

import json

import pytest

from dspark_jax.checkpoints.drafter import save_drafter
from dspark_jax.cli import main
from dspark_jax.cli.inspect import inspect_drafter, inspect_target
from tests.checkpoints.files import make_autoregressive, make_drafter, make_target, write_target


def test_target_is_described(tmp_path):
    facts = inspect_target(write_target(tmp_path / "m", make_target(tie_embeddings=True)))
    assert facts["kind"] == "target, qwen3"
    assert facts["parameters"] == "6,128"  # 40*16 + 16 + 2 * (16*(32+16+16) + 16*32 + 3*16*24 + 2*16 + 2*8)
    assert facts["head"] == "tied to the embedding"
    assert facts["taps a drafter may use"] == "-1 (embedding) to 0"


def test_drafter_is_described(tmp_path, golden):
    facts = inspect_drafter(golden("qwen3_dflash_anchor").directory / "draft")
    assert facts["kind"] == "drafter, DFlash" and facts["sequential head"] == "none"
    assert facts["confidence head"].startswith("none: every draft counts as certain")
    assert facts["taps"] == "outputs of target layers [0, 2, 4] of 6"
    assert facts["embedding and head"] == "repeated in the file"
    facts = inspect_drafter(save_drafter(tmp_path / "d", make_drafter(first_slot=1)))
    assert facts["draft vocabulary"] == "20 of 40" and facts["sequential head"] == "gated, rank 4"
    assert facts["confidence head"] == "with Markov embedding"
    assert facts["first prediction"] == "first mask slot (DFlash)"
    assert facts["embedding and head"] == "taken from the target"


def test_autoregressive_drafters_are_described(tmp_path, golden):
    facts = inspect_drafter(golden("qwen3_eagle3").directory / "draft")
    assert facts["kind"] == "drafter, Eagle3" and facts["block size (gamma)"] == 5
    assert facts["taps"] == "outputs of target layers [0, 1, 3, 4, 6] of 8"
    assert facts["confidence head"].startswith("none: every draft counts as certain")
    facts = inspect_drafter(save_drafter(tmp_path / "d", make_autoregressive("mtp")))
    assert facts["kind"] == "drafter, MTP" and "taps" not in facts
    assert facts["reads"] == "final hidden state of a target of 2 layers"


def test_command_prints_a_table_or_one_line_and_code_2(tmp_path, capsys):
    path = save_drafter(tmp_path / "d", make_drafter(confidence_head=False, confidence_with_markov=False))
    main(["inspect", str(path)])
    assert "none: every draft counts" in capsys.readouterr().out
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "markov_rank": 8}))
    for name, says in ((str(path), "expected (40, 8)"), (str(tmp_path / "none"), "does not exist")):
        with pytest.raises(SystemExit) as ended:
            main(["inspect", name])
        assert ended.value.code == 2
        assert says in capsys.readouterr().err
