"""What we write, DeepSpec (the PyTorch reference) loads with no key too few or too many, and drafts the same with.

DSPARK_REFERENCE=PATH pytest -m slow tests/checkpoints/test_reference.py, where PATH is a checkout of
github.com/deepseek-ai/DeepSpec; torch and transformers are installed by hand.
"""

import importlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import Sampling
from dspark_jax.checkpoints.drafter import save_drafter
from tests.checkpoints.files import make_autoregressive, make_drafter, make_target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # torch's and transformers' own
    pytest.mark.skipif("DSPARK_REFERENCE" not in os.environ, reason="DSPARK_REFERENCE is not set"),
]

TOLERANCE = 1e-4
G, CONTEXT = 3, (5, 4)
"""Drafts a block, and the tokens that become known before each round."""

DSPARK = {
    "vanilla": {"markov_head_type": "vanilla"},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "confidence without markov": {"confidence_with_markov": False},
    "dflash": {"markov_rank": 0, "confidence_head": False, "confidence_with_markov": False},
}


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    for library in ("torch", "transformers"):
        pytest.importorskip(library)
    monkeypatch.syspath_prepend(os.environ["DSPARK_REFERENCE"])


@pytest.fixture(scope="module")
def context():
    """Tokens [2, 10], the last an anchor, and taps [2, 9, 2 * 16] of those before it."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(38, size=(2, sum(CONTEXT) + 1))
    taps = generator.standard_normal((2, sum(CONTEXT), 32), dtype=np.float32)
    return tokens, taps


def loaded(family: str, name: str, path):
    """The reference's model, from the directory we wrote."""
    import torch

    model = getattr(importlib.import_module(f"deepspec.modeling.{family}"), name)
    model, problems = model.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
    )
    assert not any(problems.values()), problems
    return model.eval()


def our_rounds(drafter, target, tokens, taps):
    """Greedy proposals, one a round."""

    @jax.jit
    def propose(drafter, cache, taps, tokens, start):
        positions = jnp.broadcast_to(start + jnp.arange(taps.shape[1]), taps.shape[:2])
        cache = drafter.extend(cache, taps, positions, target.embed(tokens[:, :-1]))
        keys = jax.random.split(jax.random.key(0), (2, G))
        head, anchor = drafter.draft_head(target), jnp.full(2, start + taps.shape[1])
        return drafter.propose(target, head, cache, tokens[:, -1], anchor, Sampling.create(2), keys)

    cache, start, proposals = drafter.create_cache(2, 16), 0, []
    for count in CONTEXT:
        known = jnp.asarray(tokens[:, start : start + count + 1])
        proposal, cache = propose(drafter, cache, jnp.asarray(taps[:, start : start + count]), known, start)
        proposals.append(proposal)
        start += count
    return proposals


@pytest.mark.parametrize("name", DSPARK)
def test_dspark(tmp_path, context, name):
    import torch
    from transformers import DynamicCache

    target, drafter = make_target(), make_drafter(draft_vocab_size=0, num_layers=2, **DSPARK[name])
    model = loaded("dspark", "Qwen3DSparkModel", save_drafter(tmp_path / "d", drafter, target=target))
    from deepspec.eval.dspark.draft_ops import forward_dspark_draft_block

    tokens, taps = context
    cache, start = DynamicCache(), 0
    for count, ours in zip(CONTEXT, our_rounds(drafter, target, tokens, taps), strict=True):
        known, start = torch.from_numpy(taps[:, start : start + count]), start + count
        anchor = torch.from_numpy(tokens[:, start])
        with torch.inference_mode():
            hidden = forward_dspark_draft_block(
                model,
                draft_input_ids=torch.nn.functional.pad(anchor[:, None], (0, G - 1), value=model.mask_token_id),
                position_ids=torch.arange(16).expand(2, -1),
                past_key_values_draft=cache,
                target_hidden_states=known,
                start=start,
                block_size=G,
            )
            drafts, logits = model.sample_draft_tokens(
                model.compute_logits(hidden), first_prev_token_ids=anchor, hidden_states=hidden
            )
            previous = torch.cat([anchor[:, None], drafts[:, :-1]], dim=1)
            confidence = model.predict_confidence_step(hidden, prev_token_ids=previous)
        np.testing.assert_array_equal(ours.tokens, drafts)
        np.testing.assert_allclose(ours.logits, logits, rtol=0, atol=TOLERANCE)
        if confidence is None:
            assert np.isposinf(ours.confidence_logits).all()
        else:
            np.testing.assert_allclose(ours.confidence_logits, confidence, rtol=0, atol=TOLERANCE)


def test_eagle3(tmp_path, context):
    import torch
    from transformers import DynamicCache

    target, drafter = make_target(), make_autoregressive("eagle3", draft_vocab_size=0)
    model = loaded("eagle3", "Qwen3Eagle3Model", save_drafter(tmp_path / "d", drafter, target=target))
    tokens, taps = context
    cache, start = DynamicCache(), 0
    for count, ours in zip(CONTEXT, our_rounds(drafter, target, tokens, taps), strict=True):
        with torch.inference_mode():
            hidden = model.extend_draft_cache(
                hidden_states=torch.from_numpy(taps[:, start : start + count]),
                input_ids=torch.from_numpy(tokens[:, start + 1 : start + count + 1]),
                position_ids=torch.arange(start, start + count).expand(2, -1),
                past_key_values=cache,
            )
            start += count
            for k in range(G):
                logits = model.compute_logits(hidden)
                draft = model.draft_sample(logits)
                np.testing.assert_array_equal(ours.tokens[:, k], draft[:, 0])
                np.testing.assert_allclose(ours.logits[:, k], logits[:, 0], rtol=0, atol=TOLERANCE)
                hidden = model(
                    hidden_states=hidden,
                    input_ids=draft,
                    position_ids=torch.full((2, 1), start + k),
                    past_key_values=cache,
                    use_cache=True,
                )
        cache.crop(start)
