"""Records of rounds that really ran, and the fingerprint of the drafter that drafted them."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax import DrafterConfig, DSpark, Generator, Request, load_drafter, save_drafter
from dspark_jax.calibration import calibrate, drafter_fingerprint, join, record_rounds

G = 3


@pytest.fixture(scope="module")
def drafter(tiny_target) -> DSpark:
    """Random, with a strong Markov head, so that the tiny target accepts some of its drafts and rejects others."""
    c = tiny_target.config
    config = DrafterConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=32, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=8, block_size=G, tap_ids=(-1,), num_target_layers=c.num_layers,
        mask_token_id=c.vocab_size - 1, markov_rank=4, confidence_head=True, confidence_with_markov=True,
    )  # fmt: skip
    return DSpark(config, rngs=nnx.Rngs(1))


def test_rounds_of_a_generation_become_records_that_calibrate(tiny_target, drafter):
    stop = 5
    requests = [Request([1 + i, 2], 60, temperature=1.0, stop_ids=[stop], seed=i) for i in range(16)]
    generations = Generator(tiny_target, drafter).generate(requests)
    name = drafter_fingerprint(drafter)
    domains = [(d, slice(i, None, 2)) for i, d in enumerate("ab")]
    records = join(
        [record_rounds(generations[s], requests[s], domain=d, stop_ids=[], drafter=name) for d, s in domains]
    )
    assert len(records) == sum(len(g.accepted) for g in generations) and records.block_size == G
    assert records.accepted.sum() == sum(g.accepted.sum() for g in generations)
    assert any(stop in g.drafts for g in generations), "the test needs a drafted stop"
    drafts = np.concatenate([g.drafts for _, s in domains for g in generations[s]])
    for block, scheduled in zip(drafts.tolist(), records.scheduled, strict=True):
        assert scheduled <= (block.index(stop) + 1 if stop in block else G)
    found = calibrate(records, minimum=10)
    assert len(found.temperatures) == G and found.scaling_for(G, name) == found.scaling


def test_a_fingerprint_names_weights_and_not_how_they_are_kept(drafter, tmp_path):
    name = drafter_fingerprint(drafter)
    assert len(name) == 16 and int(name, 16) >= 0
    save_drafter(tmp_path / "f32", drafter)
    assert drafter_fingerprint(load_drafter(tmp_path / "f32")) == name
    save_drafter(tmp_path / "bf16", drafter, dtype=jnp.bfloat16)
    half = drafter_fingerprint(load_drafter(tmp_path / "bf16"))
    assert half != name, "rounded weights are other weights"
    assert drafter_fingerprint(load_drafter(tmp_path / "bf16", dtype=jnp.bfloat16)) == half
    other = load_drafter(tmp_path / "f32")
    assert other.confidence is not None and other.confidence.proj.bias is not None
    other.confidence.proj.bias[...] += 1e-3
    assert drafter_fingerprint(other) != name
