"""The drafter's conventions: slots, positions, what a head may know, and that training and serving see the same."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax import Decoder, DrafterConfig, DSpark, Generator, Request, Sampling, TargetConfig
from dspark_jax.decoding.sampling import distribution
from dspark_jax.drafters.heads import HEADS

D, G = 16, 5


def config(**changes) -> DrafterConfig:
    fields = {
        "vocab_size": 40, "hidden_size": D, "intermediate_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1,
        "head_dim": 8, "block_size": G, "tap_ids": (-1, 0), "num_target_layers": 2, "mask_token_id": 38,
    }  # fmt: skip
    return DrafterConfig(**{**fields, **changes})


def random_drafter(**changes) -> DSpark:
    drafter = DSpark(config(**changes), rngs=nnx.Rngs(0))
    if drafter.markov:
        drafter.markov.w2[...] = jax.random.normal(jax.random.key(1), drafter.markov.w2.shape)
    return drafter


@pytest.mark.parametrize("first_slot", [0, 1])
def test_serving_equals_training_at_any_context_length(tiny_target, first_slot):
    """Position by position what `blocks` trains is what `extend` and `propose` serve, from context 1 to 8000."""
    drafter = random_drafter(first_slot=first_slot)
    anchors = jnp.array([1, 100, 4096, 8000])
    length = 8010
    tokens = jax.random.randint(jax.random.key(0), (1, length), 0, 37)
    taps = jax.random.normal(jax.random.key(1), (1, length, 2 * D))
    positions = jnp.arange(length)[None]

    @jax.jit
    def both(drafter):
        trained = drafter.blocks(tiny_target, tokens, taps, anchors[None], positions, jnp.zeros_like(positions))[0]
        cache = drafter.extend(drafter.create_cache(1, length + G + 1), taps, positions)
        cache = jax.tree.map(lambda x: jnp.repeat(x, 4, axis=0), cache)
        keys = jax.random.split(jax.random.key(0), (4, G))
        head, sampling = drafter.draft_head(tiny_target), Sampling.create(4)
        served, _ = drafter.propose(tiny_target, head, cache, tokens[0, anchors], anchors, sampling, keys)
        return drafter.base_logits(tiny_target, head, trained), served.logits

    trained, served = both(drafter)
    np.testing.assert_allclose(served[..., :37], trained[..., :37], rtol=0, atol=2e-5)
    assert np.ptp(np.asarray(trained[..., :37]), axis=0).min() > 1e-3, "the blocks must differ to say anything"


class Tap(nnx.Module):
    """Stands in for a module, keeps what it was given and returns zeros of `size` (None: its input)."""

    def __init__(self, size: int | None):
        self.size, self.seen = size, nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.seen = nnx.Variable(x)
        return x if self.size is None else jnp.zeros((*x.shape[:-1], self.size))


def overfit(target: Decoder, tokens: jax.Array, first_slot: int) -> DSpark:
    """A parallel drafter that the training path says is perfect on tokens [t]: its last matrix by least squares."""
    drafter = random_drafter(first_slot=first_slot, num_layers=1, intermediate_size=512)
    positions = jnp.arange(len(tokens))[None]
    _, taps, _ = target(tokens[None], positions, target.create_cache(1, len(tokens)), drafter.config.tap_ids)
    anchors = jnp.arange(1, len(tokens) - G)
    down, norm = drafter.layers[0].mlp.down, drafter.norm
    drafter.layers[0].mlp.down, drafter.norm = Tap(D), Tap(None)
    drafter.blocks(target, tokens[None], taps, anchors[None], positions, jnp.zeros_like(positions))
    features, residual = drafter.layers[0].mlp.down.seen[0], drafter.norm.seen[0]
    answers = tokens[anchors[:, None] + 1 + jnp.arange(G)]
    directions = target.head_weight / jnp.linalg.norm(target.head_weight, axis=-1, keepdims=True)
    wanted, slots = 10 * directions[answers] - residual[:, first_slot:], features[:, first_slot:]
    solution = np.linalg.lstsq(np.asarray(slots, np.float64).reshape(-1, 512), np.asarray(wanted).reshape(-1, D))[0]
    drafter.layers[0].mlp.down, drafter.norm = down, norm
    down.weight[...] = jnp.asarray(solution.T, jnp.float32)
    return drafter


@pytest.mark.parametrize("first_slot", [0, 1])
def test_a_perfect_drafter_gets_whole_blocks_in_its_own_layout_only(first_slot):
    shape = TargetConfig("llama", 40, D, 32, 2, 2, 1, 8, num_tokens=37, max_positions=256)
    target = Decoder(shape, rngs=nnx.Rngs(0))
    norms = jnp.linalg.norm(target.head.weight[...], axis=-1, keepdims=True)
    target.head.weight[...] = 4 * target.head.weight[...] / norms  # each row is most like itself
    prompt, cap = [7, 21, 3], 44
    answer = Generator(target).generate([Request(prompt, cap)])[0].tokens
    drafter = overfit(target, jnp.asarray(prompt + answer), first_slot)
    lengths = Generator(target, drafter).generate([Request(prompt, 1 + 6 * (G + 1))])[0].accept_lengths
    np.testing.assert_array_equal(lengths, [G + 1] * 6)
    drafter.config = dataclasses.replace(drafter.config, first_slot=1 - first_slot)
    lengths = Generator(target, drafter).generate([Request(prompt, cap - G)])[0].accept_lengths
    assert lengths.mean() < 2, "the other layout must show in acceptance"


@pytest.mark.parametrize("head", sorted(HEADS))
def test_heads_step_as_they_train(head):
    drafter = random_drafter(markov_rank=6, markov_head_type=head)
    previous = jax.random.randint(jax.random.key(0), (3, G), 0, 37)
    hidden = jax.random.normal(jax.random.key(1), (3, G, D))
    state, latents = drafter.markov.initial_state((3,), jnp.float32), []
    for k in range(G):
        latent, state = drafter.markov.step(previous[:, k], hidden[:, k], state)
        latents.append(latent)
    np.testing.assert_allclose(drafter.latents(previous, hidden), jnp.stack(latents, 1), atol=1e-6)


@pytest.mark.parametrize(("head", "reduced"), list(itertools.product(sorted(HEADS), [0, 12])))
def test_corrections_and_confidences_know_the_prefix_and_nothing_behind(tiny_target, head, reduced):
    """Position k is scored as in training from x_0 .. x_{k-1}: no draft can steer its own verification."""
    drafter = random_drafter(
        markov_rank=6,
        markov_head_type=head,
        confidence_head=True,
        confidence_with_markov=True,
        draft_vocab_size=reduced,
    )
    if reduced:
        drafter.draft_ids[...] = jnp.arange(12) * 3 + 2
    rows = 32
    hidden = jnp.broadcast_to(jax.random.normal(jax.random.key(1), (G, D)), (rows, G, D))
    base = drafter.base_logits(tiny_target, drafter.draft_head(tiny_target), hidden)
    anchor, keys = jnp.full((rows,), 5), jax.random.split(jax.random.key(2), (rows, G))
    sampling = Sampling.create(rows, 1.0, top_p=0.9)
    proposal = jax.jit(drafter.correct)(base, hidden, anchor, sampling, keys)
    previous = jnp.concatenate([anchor[:, None], proposal.tokens[:, :-1]], axis=1)
    bias = drafter.latents(previous, hidden) @ drafter.markov.w2[...].T
    np.testing.assert_allclose(proposal.logits, base + bias, atol=1e-4)
    np.testing.assert_allclose(proposal.probs, distribution(proposal.logits, sampling), atol=1e-6)
    np.testing.assert_allclose(proposal.confidence_logits, drafter.confidence_logits(previous, hidden), atol=1e-5)
    assert np.ptp(np.asarray(proposal.confidence_logits)[:, 1:], axis=0).min() > 1e-3
    assert (np.asarray(proposal.tokens) < 37).all()
    if reduced:
        assert set(np.unique(proposal.tokens)) <= set((np.arange(12) * 3 + 2).tolist())
        columns = np.searchsorted(np.arange(12) * 3 + 2, np.asarray(proposal.tokens))
        assert (np.take_along_axis(np.asarray(proposal.probs), columns[..., None], -1) > 0).all()


def test_without_a_confidence_head_every_draft_is_trusted(tiny_target):
    drafter = random_drafter()
    hidden = jnp.zeros((2, G, D))
    base = drafter.base_logits(tiny_target, drafter.draft_head(tiny_target), hidden)
    keys = jax.random.split(jax.random.key(2), (2, G))
    proposal = drafter.correct(base, hidden, jnp.zeros(2, int), Sampling.create(2), keys)
    assert np.isposinf(proposal.confidence_logits).all()
    assert drafter.latents(jnp.zeros((2, G), int), hidden) is None


def test_blocks_outside_what_was_trained_are_refused(tiny_target):
    drafter = random_drafter()
    arguments = (drafter.create_cache(1, 16), jnp.zeros(1, int), jnp.ones(1, int), Sampling.create(1))
    for size in (0, G + 1):
        with pytest.raises(ValueError, match=f"within 1..{G}"):
            drafter.propose(tiny_target, drafter.draft_head(tiny_target), *arguments, None, size)
    for changes in ({"block_size": 0}, {"first_slot": 2}, {"mask_token_id": 40}, {"markov_head_type": "lstm"},
                    {"confidence_with_markov": True}, {"draft_vocab_size": 41}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(changes)).removesuffix("with_markov")):
            config(**changes)
