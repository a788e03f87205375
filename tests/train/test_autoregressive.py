"""Eagle3 and MTP through the run that trains DSpark: from a tiny config to an exported drafter that decodes."""

import dataclasses
import json

import pytest

from configs import tiny_eagle3, tiny_mtp
from dspark_jax import MTP, load_drafter, speculative_generate
from dspark_jax.decoding.generate import generate
from train.loop import Trainer

RUNS = {"eagle3": tiny_eagle3.run, "mtp": tiny_mtp.run}
OF_THE_TEST = ("out", "data", "target", "checkpoint_every")


@pytest.mark.parametrize("kind", sorted(RUNS))
def test_a_tiny_config_trains_exports_and_decodes(kind, tiny_run, disk_target):
    run = dataclasses.replace(RUNS[kind], **{name: getattr(tiny_run, name) for name in OF_THE_TEST}, log_every=1)
    trainer = Trainer(run, disk_target.model)
    last = trainer.train(until=10)
    first = json.loads((trainer.out / "metrics.jsonl").read_text().splitlines()[0])
    assert last["loss"] < 0.95 * first["loss"] and last["loss"] == pytest.approx(last["soft"])
    assert len(last["accept_rate"]) == run.block_size
    drafter = load_drafter(trainer.export(), target=disk_target.model)
    assert drafter.config == run.drafter(disk_target.model.config) and drafter.config.step_decay == 0.8
    drafter = drafter.repeated(3) if isinstance(drafter, MTP) else drafter
    prompt, options = [3, 9, 12, 5], {"max_tokens": 40, "ignore_eos": True}
    (drafted,) = speculative_generate(disk_target.model, drafter, [prompt], **options)
    assert drafted.tokens == generate(disk_target.model, [prompt], **options)[0].tokens
    assert drafted.drafts.shape[1] == drafter.config.block_size

    # A run from before there was a choice goes on; one of another kind does not.
    note = trainer.out / "run.json"
    settings = json.loads(note.read_text())
    note.write_text(json.dumps({k: v for k, v in settings.items() if k != "optimizer"}))
    assert Trainer(run, disk_target.model).step == 10
    note.write_text(json.dumps({k: v for k, v in settings.items() if k != "kind"}))
    with pytest.raises(ValueError, match=f"'kind': .'dspark', '{kind}'."):
        Trainer(run, disk_target.model)
