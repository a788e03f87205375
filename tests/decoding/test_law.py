"""The output law, exactly by enumeration of everything that can be drawn, and by counting real draws."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from dspark_jax import (
    MTP,
    Decoder,
    DrafterConfig,
    DSpark,
    Eagle3,
    Eagle3Config,
    Fixed,
    MTPConfig,
    Proposal,
    Sampling,
    TargetConfig,
    Threshold,
)
from dspark_jax.calibration.survival import Scaling, to_survival
from dspark_jax.decoding.keys import Purpose, slot_keys
from dspark_jax.decoding.sampling import distribution, draw
from dspark_jax.decoding.verify import accept_probability, next_distribution, spread, verify
from dspark_jax.drafters.heads import HEADS
from dspark_jax.scheduling import EarlyStop, Gate, LaggedCapacity, Round, StepCosts

V, G = 4, 3
EXACT = 1e-9
COSTS = StepCosts.from_steps_per_second({1: 1 / 4.0, 2: 1 / 5.5, 3: 1 / 6.5, 4: 1 / 7.0})
BY_COST = (EarlyStop(COSTS), LaggedCapacity(COSTS), Gate(EarlyStop(COSTS, minimum_gain=0.04), COSTS))
SETTINGS = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 2},
    {"temperature": 1.3, "top_p": 0.75},
    {"temperature": 0.9, "top_k": 3, "top_p": 0.9, "min_p": 0.2},
    {"temperature": 0.0},
)


def strings(v: int, length: int) -> np.ndarray:
    """All strings [v ** length, length], in the order of their numbers in base v."""
    return np.array(list(itertools.product(range(v), repeat=length))).reshape(-1, length)


def number(v: int, tokens: np.ndarray) -> np.ndarray:
    """Where strings [..., length] stand in `strings`."""
    return tokens @ v ** np.arange(tokens.shape[-1])[::-1] if tokens.shape[-1] else np.zeros(len(tokens), int)


def by_prefix(x: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """x [n, k, ...] with entry k of every row taken from the first row that shares its first k tokens.

    These know nothing else, but the same prefix in two rows of a float32 batch may round in two ways.
    """
    columns = []
    for k in range(x.shape[1]):
        _, first, same = np.unique(tokens[:, :k], axis=0, return_index=True, return_inverse=True)
        np.testing.assert_allclose(x[:, k], x[first[same.ravel()], k], rtol=1e-4, atol=1e-6)
        columns.append(x[first[same.ravel()], k])
    return np.stack(columns, axis=1)


def law_by_enumeration(p, q, drafts, lengths):
    """Law [v ** (g + 1)] of the first g + 1 tokens, and the target's own.

    A round's tokens are completed by plain decoding. Acceptance and the law of the next token are the sampler's own.

    Args:
      p: [v ** g, g + 1, v] target distributions along every string; q: [n, g, v] draft distributions along every block
        drafts [n, g] that can be drawn; lengths: [n] drafts verified of each.
    """
    exact = lambda x: np.asarray(x, np.float64) / np.asarray(x, np.float64).sum(axis=-1, keepdims=True)  # noqa: E731
    p, q, drafts = exact(p), exact(q), np.asarray(drafts)
    n, g = drafts.shape
    v = p.shape[-1]
    along = p[number(v, drafts)]
    drawn = np.take_along_axis(q, drafts[..., None], axis=-1)[..., 0].prod(axis=1)
    assert abs(drawn.sum() - 1) < EXACT
    with jax.enable_x64(True):
        accept = np.asarray(accept_probability(jnp.asarray(along), jnp.asarray(q), drafts))
    assert accept.dtype == np.float64
    everything = strings(v, g + 1)
    conditional = p[number(v, everything[:, :-1])]
    conditional = np.take_along_axis(conditional, everything[..., None], axis=-1)[..., 0]
    law = np.zeros(len(everything))
    for accepted in range(g + 1):
        stops = np.where(accepted < lengths, 1 - accept[:, min(accepted, g - 1)], accepted == lengths)
        mass = drawn * accept[:, :accepted].prod(axis=1) * stops
        with jax.enable_x64(True):
            following = exact(next_distribution(jnp.asarray(along), jnp.asarray(q), jnp.full(n, accepted), lengths))
        emitted = np.zeros((v**accepted, v))
        np.add.at(emitted, number(v, drafts[:, :accepted]), mass[:, None] * following)
        start = emitted[number(v, everything[:, :accepted]), everything[:, accepted]]
        law += start * conditional[:, accepted + 1 :].prod(axis=1)
    return law, conditional.prod(axis=1)


@dataclasses.dataclass(frozen=True)
class LookAhead:
    """Verifies all or nothing by the last confidence: it knows the tokens it decides on."""

    def lengths(self, confidence_logits):
        return jnp.where(confidence_logits[:, -1] > jnp.median(confidence_logits[:, -1]), confidence_logits.shape[1], 0)


@functools.partial(jax.jit, static_argnames="policy")
def lengths_of_each(policy, survival, room):
    """Lengths [n] of blocks with survival [n, g], each the only request of a round."""
    round, state = Round(jnp.ones(1, bool), jnp.full(1, room)), policy.initial_state(1, G)
    return jax.vmap(lambda s: policy.lengths(s[None], round, state)[0])(survival)


@pytest.fixture(scope="module")
def law_target():
    return Decoder(TargetConfig("llama", V + 1, 16, 16, 2, 2, 1, 8, num_tokens=V), rngs=nnx.Rngs(5))


def random_drafter(kind: str | None, reduced: bool) -> DSpark | Eagle3 | MTP:
    """A drafter of G tokens; `kind` is a sequential head, None for the parallel drafter, or eagle3 or mtp."""
    shape = dict(
        vocab_size=V + 1, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=8, block_size=G,
        num_target_layers=2, draft_vocab_size=3 if reduced else 0,
    )  # fmt: skip
    if kind == "mtp":
        drafter = MTP(MTPConfig(**shape), rngs=nnx.Rngs(7))
    elif kind == "eagle3":
        drafter = Eagle3(Eagle3Config(**shape, tap_ids=(-1, 0)), rngs=nnx.Rngs(7))
    else:
        config = DrafterConfig(
            **shape, num_layers=1, tap_ids=(-1, 0), mask_token_id=V, markov_rank=6 if kind else 0,
            markov_head_type=kind or "vanilla", confidence_head=True, confidence_with_markov=bool(kind),
        )  # fmt: skip
        drafter = DSpark(config, rngs=nnx.Rngs(7))
        if kind:
            drafter.markov.w2[...] = jax.random.normal(jax.random.key(1), drafter.markov.w2.shape)
        drafter.confidence.proj.weight[...] *= 3
    if reduced:
        drafter.draft_ids[...] = jnp.array([0, 2, 3])
    return drafter


def enumerate_case(monkeypatch, target, kind: str | None, reduced: bool):
    """Yields p, q, blocks and confidences of a random drafter under each of SETTINGS."""
    drafter = random_drafter(kind, reduced)
    # "Keys" are the rows to draw: drafting is real, only chance is not.
    for module in ("dspark", "autoregressive"):
        monkeypatch.setattr(
            f"dspark_jax.drafters.{module}.draw",
            lambda logits, sampling, forced: (forced, distribution(logits, sampling)),
        )
    context = jnp.array([[1, 3, 0, 2, 2]])
    anchor = context.shape[1] - 1

    @jax.jit
    def draft(rows, sampling):
        n, positions = rows.shape[0], jnp.arange(anchor)[None]
        hidden, taps, _ = target(context[:, :-1], positions, target.create_cache(1, 8), drafter.config.tap_ids)
        read = hidden if drafter.config.reads_final_hidden else taps
        cache = drafter.extend(drafter.create_cache(1, 16), read, positions, target.embed(context[:, :-1]))
        cache = jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), cache)
        head, at = drafter.draft_head(target), jnp.full((n,), anchor)
        proposal, _ = drafter.propose(target, head, cache, jnp.full((n,), context[0, -1]), at, sampling, rows)
        return proposal, spread(proposal.probs, proposal.draft_ids, V + 1)[..., :V]

    @jax.jit
    def verified(tokens, sampling):
        tokens = jnp.concatenate([jnp.repeat(context, len(tokens), axis=0), tokens], axis=1)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _, _ = target(tokens, positions, target.create_cache(len(tokens), 16))
        return distribution(target.logits(hidden[:, anchor:]), sampling)

    rows = strings(3 if reduced else V + 1, G)
    for setting in SETTINGS:
        proposal, q = draft(jnp.asarray(rows), Sampling.create(len(rows), **setting))
        p = verified(jnp.asarray(strings(V, G)), Sampling.create(V**G, **setting))
        assert not p[..., V:].any()
        real = np.asarray(proposal.tokens < V).all(axis=1)
        q, drafts, confidences = (np.asarray(x)[real] for x in (q, proposal.tokens, proposal.confidence_logits))
        yield (
            by_prefix(q, drafts),
            drafts,
            by_prefix(confidences, drafts),
            by_prefix(np.asarray(p[..., :V]), strings(V, G)),
        )


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", [None, "vanilla", "gated", "rnn", "eagle3", "mtp"])
def test_law_is_the_targets(monkeypatch, law_target, kind, reduced):
    for i, (q, drafts, confidences, p) in enumerate(enumerate_case(monkeypatch, law_target, kind, reduced)):
        survival = to_survival(confidences)
        scaled = to_survival(confidences, Scaling((0.4, 3.0, 1.5), (0.7, -0.4, 0.0)))
        thresholds = [Threshold(float(np.median(survival[:, k]))) for k in range(1, G)]
        cases = [(policy, survival) for policy in (Fixed(0), Fixed(1), Fixed(), *thresholds)]
        cases += [(policy, known) for policy in BY_COST for known in (survival, scaled)]
        chosen = {tuple(lengths_of_each(*case, room).tolist()) for case in cases for room in (2, G)}
        for lengths in chosen:
            law, target = law_by_enumeration(p, q, drafts, np.array(lengths))
            np.testing.assert_allclose(law, target, rtol=0, atol=EXACT)
        if i == 0 and kind in HEADS:
            assert any(len(set(lengths)) > 1 for lengths in chosen), "lengths must depend on the drafts"
            law, target = law_by_enumeration(p, q, drafts, np.asarray(LookAhead().lengths(confidences)))
            assert np.abs(law - target).max() > 1e-4, "a policy that looks ahead must not pass"


def test_review_counterexample_of_an_anticipating_policy():
    p, q = np.array([[[0.7, 0.3]] * 2] * 2, np.float32), np.array([[[0.5, 0.5]]] * 2, np.float32)
    drafts = np.array([[0], [1]])
    for lengths, expected in (([1, 1], 0.7), ([0, 0], 0.7), ([1, 0], 0.85)):
        law, _ = law_by_enumeration(p, q, drafts, np.array(lengths))
        assert law.reshape(2, 2).sum(axis=1)[0] == pytest.approx(expected, abs=1e-7)


P = np.array([0.45, 0.25, 0.15, 0.1, 0.05])
Q = np.array([0.1, 0.3, 0.25, 0.05, 0.3])
TRIALS = 200_000


@pytest.fixture(scope="module")
def trials():
    """Drafts and verifies TRIALS blocks of constant distributions with real keys."""

    @jax.jit
    def run(seed, target_logits, draft_logits, temperature):
        keys = jax.random.split(jax.random.key(seed), TRIALS)
        position = jnp.full((TRIALS,), 11)
        sampling = Sampling(*(jnp.full((TRIALS,), x) for x in (temperature, 0, 1.0, 0.0)))
        logits = jnp.broadcast_to(draft_logits, (TRIALS, 5))
        slots = slot_keys(keys, position, Purpose.DRAFT, G)
        tokens, probs = zip(*(draw(logits, sampling, slots[:, k]) for k in range(G)), strict=True)
        proposal = Proposal(jnp.stack(tokens, 1), jnp.stack(probs, 1), None, jnp.zeros((TRIALS, G)), logits)
        target = jnp.broadcast_to(target_logits, (TRIALS, G + 1, 5))
        accepted, token = verify(target, proposal, jnp.full((TRIALS,), G), sampling, keys, position)
        return proposal.tokens, accepted, token

    return lambda seed, p, q, t: jax.device_get(run(seed, np.log(p, dtype=np.float32), np.log(q, dtype=np.float32), t))


def chi_square(counts: np.ndarray, law: np.ndarray) -> float:
    """p-value of counts under a law."""
    return stats.chisquare(counts.ravel(), law.ravel() / law.sum() * counts.sum()).pvalue


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_slot_follows_the_target(trials, temperature):
    p, q = (x ** (1 / temperature) / (x ** (1 / temperature)).sum() for x in (P, Q))
    drafts, accepted, token = trials(int(10 * temperature), P, Q, temperature)
    both = np.minimum(p, q)
    block = np.where(np.arange(G + 1) < accepted[:, None], np.pad(drafts, ((0, 0), (0, 1))), token[:, None])
    for slot in range(G + 1):
        reached = accepted >= slot
        assert chi_square(np.bincount(block[reached, slot], minlength=5), p) > 1e-3
        assert reached.mean() == pytest.approx(both.sum() ** slot, abs=5e-3)
    # Neighbours are independent: a key shared by two draws would tie them.
    for slot in range(1, G + 1):
        reached = accepted >= slot
        pairs = np.zeros((5, 5))
        np.add.at(pairs, (block[reached, slot - 1], block[reached, slot]), 1)
        assert chi_square(pairs, np.outer(both, p)) > 1e-3


def test_equal_distributions_accept_everything(trials):
    for temperature in (1.0, 0.7):
        _, accepted, _ = trials(3, P, P, temperature)
        assert (accepted == G).all()


def test_residual_without_mass_and_favourite_never_drafted():
    p = jnp.array([[[0.6, 0.4, 0.0], [0.6, 0.4, 0.0]]])
    one = jnp.ones(1, int)
    # q exceeds p by rounding everywhere: the next token still has a law.
    law = next_distribution(p, p[:, :1] * (1 + 1e-7), 0 * one, one)
    np.testing.assert_allclose(law / law.sum(), [[0.6, 0.4, 0.0]], rtol=1e-6)
    never = jnp.array([[[0.0, 0.9, 0.1]]])
    np.testing.assert_allclose(next_distribution(p, never, 0 * one, one), [[0.6, 0, 0]], rtol=1e-6)
    assert float(accept_probability(p, never, jnp.array([[2]]))[0, 0]) == 0
    assert not np.isnan(accept_probability(p, jnp.zeros_like(never), jnp.array([[2]]))).any()
