"""Drafting and decoding against the reference's numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import Generator, Request, Sampling

DSPARK = ("qwen3_dspark_markov", "qwen3_dspark_rnn", "qwen3_dflash_anchor")
NAMES = ("block_hidden", "base_logits", "logits", "confidence_logits", "tokens")
TOLERANCE = {"rtol": 0, "atol": 1e-4}


def prompts(case) -> list[list[int]]:
    count = sum(name.endswith(".prompt") for name in case.expected)
    return [case.expected[f"decode{i}.prompt"][0].tolist() for i in range(count)]


@pytest.mark.parametrize("name", [*DSPARK, "qwen3_eagle3"])
def test_tokens_and_acceptance_equal_the_reference(golden, name):
    case = golden(name)
    requests = [Request(prompt, max_tokens=40) for prompt in prompts(case)]
    drafted = Generator(case.target, case.drafter).generate(requests)
    for i, result in enumerate(drafted):
        expected = {key: case.expected[f"decode{i}.{key}"] for key in ("greedy", "speculative", "acceptance_lengths")}
        assert result.tokens[:24] == expected["greedy"].tolist() == expected["speculative"].tolist()
        # The reference runs until its rounds, the first token apart, made 24 tokens; it never shortens a block.
        lengths = expected["acceptance_lengths"]
        assert lengths[:-1].sum() < 24 <= lengths.sum()
        np.testing.assert_array_equal(result.accept_lengths[: len(lengths)], lengths)
        for n in range(3):
            np.testing.assert_array_equal(result.drafts[n], case.expected[f"decode{i}.round{n}.tokens"][0])


@pytest.mark.parametrize("name", DSPARK)
def test_rounds_equal_the_reference(golden, name):
    case = golden(name)
    target, drafter, expected = case.target, case.drafter, case.expected
    g, mask = drafter.config.block_size, drafter.config.mask_token_id
    rounds = [(i, n) for i in range(len(prompts(case))) for n in (0, 2)]
    committed, anchors = np.zeros((len(rounds), 64), np.int32), []
    for row, (i, n) in enumerate(rounds):
        tokens = prompts(case)[i] + expected[f"decode{i}.greedy"].tolist()
        committed[row, : len(tokens)] = tokens
        # The anchor of round n stands behind the prompt and what the rounds before emitted.
        anchors.append(len(prompts(case)[i]) + int(expected[f"decode{i}.acceptance_lengths"][:n].sum()))

    @jax.jit
    def draft(tokens, position):
        b = len(rounds)
        before = jnp.where(jnp.arange(64) < position[:, None], jnp.arange(64), -1)
        _, taps, _ = target(tokens, before, target.create_cache(b, 64), drafter.config.tap_ids)
        cache = drafter.extend(drafter.create_cache(b, 64 + g), taps, before)
        anchor = jnp.take_along_axis(tokens, position[:, None], axis=1)
        block = target.embed(jnp.pad(anchor, ((0, 0), (0, g - 1)), constant_values=mask))
        hidden, _ = drafter.backbone(cache, block, position)
        keys = jax.random.split(jax.random.key(0), (b, g))
        head, sampling = drafter.draft_head(target), Sampling.create(b)
        proposal, _ = drafter.propose(target, head, cache, anchor[:, 0], position, sampling, keys)
        return hidden, drafter.base_logits(target, head, hidden), proposal

    hidden, base, proposal = draft(committed, jnp.asarray(anchors))
    for row, (i, n) in enumerate(rounds):
        want = {name: expected.get(f"decode{i}.round{n}.{name}") for name in NAMES}
        np.testing.assert_array_equal(proposal.tokens[row], want["tokens"][0])
        got = dict(zip(NAMES, (hidden, base, proposal.logits, proposal.confidence_logits), strict=False))
        for name, values in got.items():
            if want[name] is not None:
                np.testing.assert_allclose(values[row], want[name][0], **TOLERANCE)
