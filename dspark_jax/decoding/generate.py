"""Generation: whole loops as one program, the same steps one by one for streaming, batches that rows join and leave."""

import dataclasses
import logging
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.calibration.survival import Scaling
from dspark_jax.decoding.keys import request_keys, seeds_of
from dspark_jax.decoding.sampling import Sampling
from dspark_jax.decoding.state import Finish, Record, State
from dspark_jax.decoding.step import Models, plain_round, prefill, speculative_round
from dspark_jax.models.config import TargetConfig
from dspark_jax.models.decoder import Decoder, check_taps
from dspark_jax.scheduling.policies import Fixed, Policy

CHUNK = 64
"""Prompt tokens a prefill step; also the granularity of cache lengths."""

STOP_SLOTS = 8
"""Stop ids a row without recompiling; more are possible and compile once more."""

USELESS = 1.05
"""A mean accepted length below this says that nearly every draft was rejected."""

USELESS_ROUNDS = 64
"""Rounds before a low mean says anything."""

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
      prompt: token ids.
      max_tokens: new tokens at most.
      stop_ids: ids that end the answer, besides the target's own.
      ignore_eos: the target's own stop ids do not end the answer; those in `stop_ids` still do.
      seed: of this request's draws, 64 bits; None draws a fresh one from the system.
    """

    prompt: Sequence[int]
    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None


@dataclasses.dataclass(frozen=True)
class Generation:
    """What came out for one prompt.

    Attributes:
      tokens: new token ids, the stop id included if one ended it.
      finish_reason: `stop` or `length`.
      accept_lengths: [rounds] tokens of every round: accepted drafts + 1, unless a draft ended the answer; ones in
        plain decoding. The first token comes from the prompt's own pass and belongs to no round.
      accepted: [rounds] drafts accepted, none behind a stop id.
      scheduled: [rounds] drafts verified, none behind a stop id.
      confidence_logits, drafts: [rounds, g] of every drafted block, nan and -1 in a round that the policy left
        undrafted (empty without a drafter).
    """

    tokens: list[int]
    finish_reason: str
    accept_lengths: np.ndarray
    accepted: np.ndarray
    scheduled: np.ndarray
    confidence_logits: np.ndarray
    drafts: np.ndarray

    @property
    def mean_accept_length(self) -> float:
        """Tokens a round, the bonus included (tau); nan without rounds."""
        return float(self.accept_lengths.mean()) if len(self.accept_lengths) else float("nan")

    def drafted(self) -> "Generation":
        """The same with the drafted rounds alone in every array of rounds."""
        names = ("accept_lengths", "accepted", "scheduled", "confidence_logits", "drafts")
        rounds = self.drafts[:, 0] >= 0 if self.drafts.shape[1] else np.zeros(len(self.drafts), bool)
        return dataclasses.replace(self, **{name: getattr(self, name)[rounds] for name in names})


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The static half of a program."""

    target: Any
    drafter: Any
    policy: Policy | None
    block_size: int
    scaling: Scaling | None = None

    def models(self, params) -> Models:
        target, drafter, head = params
        drafter = None if self.drafter is None else nnx.merge(self.drafter, drafter)
        return Models(nnx.merge(self.target, target), drafter, head)

    def round(self, models: Models, state: State) -> State:
        if self.policy is None:
            return plain_round(models, state)
        return speculative_round(models, state, self.policy, self.block_size, self.scaling)


@partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def _prefill(plan: _Plan, params, state: State) -> State:
    return prefill(plan.models(params), state, CHUNK)


@partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def _round(plan: _Plan, params, state: State) -> State:
    return plan.round(plan.models(params), state)


@partial(jax.jit, static_argnames=("plan", "rounds"), donate_argnames=("state",))
def _rounds(plan: _Plan, params, state: State, rounds: int) -> State:
    """Up to `rounds` rounds, fewer when every row has ended."""
    models = plan.models(params)
    go_on = lambda c: (c[0] < rounds) & jnp.any(c[1].running)  # noqa: E731
    return jax.lax.while_loop(go_on, lambda c: (c[0] + 1, plan.round(models, c[1])), (0, state))[1]


@partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def _run(plan: _Plan, params, state: State) -> State:
    models = plan.models(params)
    state = prefill(models, state, CHUNK)
    return jax.lax.while_loop(lambda s: jnp.any(s.running), partial(plan.round, models), state)


@partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def _insert(plan: _Plan, state: State, new: State, rows: jax.Array) -> State:
    """Puts the rows of `new` [n] at `rows` [n] of `state`; the policy hears of it."""

    def put(old, fresh):
        return old.at[rows].set(fresh)

    policy = state.policy
    if plan.policy is not None:
        policy = plan.policy.renew(policy, jnp.zeros(state.length.shape, bool).at[rows].set(True))
    return jax.tree.map(put, state.replace(policy=()), new).replace(policy=policy)


class Generator:
    """Generates with a target and, optionally, a drafter.

    Holds the models split once, and the drafter's head prepared once; every call with the same number of rows and cache
    size runs the same compiled program, whatever the prompts' lengths and sampling parameters.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Any = None,
        *,
        policy: Policy | None = None,
        block_size: int | None = None,
        max_length: int | None = None,
        confidence_scaling: Scaling | None = None,
    ):
        """Args:
          policy: how many drafts to verify; None verifies whole blocks.
          block_size: drafts a round, at most what the drafter was trained for; 0 is plain decoding.
          max_length: positions a row, prompt included. Given, caches have just this size, and every request runs the
            same program; None is the target's own limit, with caches that double as requests need.
          confidence_scaling: of a calibration, of at least `block_size` positions; None takes confidences as they are.

        Raises:
          ValueError: drafter and target do not fit (see `check_pair`), a size is out of range, the scaling has too few
            positions, or the policy looks ahead.
        """
        if drafter is not None:
            check_pair(target, drafter)
        trained: int = 0 if drafter is None else drafter.config.block_size
        block_size = trained if block_size is None else block_size
        if not 0 <= block_size <= trained:
            raise ValueError(
                f"block_size must be within 0..{trained}, what the drafter was trained for; got {block_size}. "
                "Positions it never saw would be noise."
            )
        drafter = drafter if block_size else None
        self.target_config = target.config
        self._fixed = max_length is not None
        self.max_length = target.config.max_positions if max_length is None else max_length
        if not 1 < self.max_length <= target.config.max_positions:
            raise ValueError(f"max_length must be within 2..{target.config.max_positions}, got {self.max_length}.")
        graph, params = nnx.split(target)
        draft_graph, draft_params = (None, None) if drafter is None else nnx.split(drafter)
        head = None if drafter is None else drafter.draft_head(target)
        policy = None if drafter is None else policy or Fixed()
        if policy is not None and policy.anticipates:
            raise ValueError(f"{type(policy).__name__} decides on tokens by what they drew; it is for measuring only.")
        scaling = None if confidence_scaling is None or not block_size else confidence_scaling.first(block_size)
        self._plan = _Plan(graph, draft_graph, policy, block_size, scaling)
        self._params = (params, draft_params, head)
        self._create_cache = target.create_cache
        self._create_draft_cache = None if drafter is None else drafter.create_cache
        # A block may reach past the last position, by the slots of its drafts.
        self._slack = 0 if drafter is None else trained + 2

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Generates for all requests as one batch, in one XLA program without host synchronisation inside."""
        state = _run(self._plan, self._params, self._state(requests, self._slots(requests)))
        tokens, length, finish, rounds, record = jax.device_get(
            (state.tokens, state.length, state.finish, state.rounds, state.record)
        )
        generations = [
            self._generation(tokens[i], len(r.prompt), length[i], finish[i], rounds[i], _row(record, i))
            for i, r in enumerate(requests)
        ]
        warn_if_useless(generations)
        return generations

    def stream(self, request: Request) -> Iterator[list[int]]:
        """Yields the new tokens of every round, as soon as the round is over. Same tokens as `generate`."""
        batch = Batch(self, rows=1, slots=self._slots([request]))
        batch.admit({0: request})
        seen = 0
        while True:
            tokens = batch.tokens(0)
            yield tokens[seen:]
            seen = len(tokens)
            if not batch.running[0]:
                return warn_if_useless([batch.result(0)])
            batch.step()

    def _slots(self, requests: Sequence[Request]) -> int:
        """Cache positions for these requests: the size asked for, or doubling ones, so that few programs compile."""
        if self._fixed:
            return whole_chunks(self.max_length)
        for request in requests:
            check_request(request, self.target_config, self.max_length)
        ends = [len(r.prompt) + int(r.max_tokens) for r in requests]
        need = min(max(ends, default=1), self.max_length)
        slots = CHUNK * 4
        while slots < need:
            slots *= 2
        return min(slots, whole_chunks(self.max_length))

    def _state(self, requests: Sequence[Request], slots: int) -> State:
        """A fresh state with the prompts in place and empty caches."""
        if not requests:
            raise ValueError("expected at least one request, got none.")
        n = len(requests)
        tokens = np.zeros((n, slots), np.int32)
        for i, request in enumerate(requests):
            check_request(request, self.target_config, min(self.max_length, slots))
            tokens[i, : len(request.prompt)] = request.prompt
        lengths = np.array([len(r.prompt) for r in requests], np.int32)
        room = min(self.max_length, slots)
        # In Python's integers: a cap such as sys.maxsize must not wrap around.
        limit = np.array([min(len(r.prompt) + int(r.max_tokens), room) for r in requests], np.int32)
        stops = [stop_ids_of(r, self.target_config) for r in requests]
        stop_ids = np.full((n, max(STOP_SLOTS, *map(len, stops))), -1, np.int32)
        for i, ids in enumerate(stops):
            stop_ids[i, : len(ids)] = ids
        names = ("temperature", "top_k", "top_p", "min_p")
        g = self._plan.block_size
        rounds = slots if g else 0
        return State(
            tokens=jnp.asarray(tokens),
            prompt_length=jnp.asarray(lengths),
            length=jnp.asarray(lengths.copy()),
            limit=jnp.asarray(limit),
            finish=jnp.zeros((n,), jnp.int8),
            keys=request_keys(seeds_of([r.seed for r in requests])),
            sampling=Sampling.create(n, *([getattr(r, name) for r in requests] for name in names)),
            stop_ids=jnp.asarray(stop_ids),
            cache=self._create_cache(n, slots),
            draft_cache=None if self._create_draft_cache is None else self._create_draft_cache(n, slots + self._slack),
            rounds=jnp.zeros((n,), jnp.int32),
            record=Record(
                accepted=jnp.zeros((n, rounds), jnp.int8),
                scheduled=jnp.zeros((n, rounds), jnp.int8),
                confidences=jnp.zeros((n, rounds, g), jnp.float32),
                drafts=jnp.zeros((n, rounds, g), jnp.int32),
            ),
            # Copies, since a donated state must not hold one buffer twice.
            policy=jax.tree.map(jnp.copy, self._plan.policy.initial_state(n, g)) if self._plan.policy else (),
        )

    def _generation(self, tokens, prompt_length, length, finish, rounds, record) -> Generation:
        none = np.zeros(rounds, np.int32)
        accepted, scheduled = (
            x[:rounds].astype(np.int32) if self._plan.block_size else none for x in (record.accepted, record.scheduled)
        )
        lengths = accepted + 1
        # No token follows a draft that is a stop id.
        lengths[-1:] = length - prompt_length - 1 - lengths[:-1].sum()
        return Generation(
            tokens=tokens[prompt_length:length].tolist(),
            finish_reason="stop" if finish == Finish.STOP else "length",
            accept_lengths=lengths,
            accepted=accepted,
            scheduled=scheduled,
            confidence_logits=record.confidences[:rounds],
            drafts=record.drafts[:rounds],
        )


class Batch:
    """A batch that requests join and leave between rounds.

    Each result equals the request's solo run if the policy looks at each request alone; if it weighs them against each
    other, sampled tokens have the same law, and greedy ones are the same.
    """

    def __init__(self, generator: Generator, rows: int, slots: int):
        """`rows` requests at a time, each of at most `slots` positions (a multiple of CHUNK)."""
        if slots % CHUNK:
            raise ValueError(f"slots must be a multiple of {CHUNK}, got {slots}.")
        self.generator, self.slots = generator, slots
        idle = generator._state([Request([0], max_tokens=1, seed=0)] * rows, slots)
        self.state = idle.replace(finish=jnp.full((rows,), Finish.EMPTY, jnp.int8))
        self._requests: dict[int, Request] = {}
        self._fetch()

    def admit(self, requests: dict[int, Request]) -> None:
        """Prefills requests together and puts each into its row; what a row held before is gone.

        Groups are padded to powers of two by repeating a request, so few programs are compiled.

        Raises:
          ValueError: no request, a row that does not exist, or a request that `Generator.generate` would refuse.
        """
        rows = list(requests)
        if not rows or not all(0 <= row < len(self._finish) for row in rows):
            raise ValueError(f"expected requests for rows within 0..{len(self._finish) - 1}, got rows {rows}.")
        padded = rows + [rows[0]] * ((1 << (len(rows) - 1).bit_length()) - len(rows))
        new = self.generator._state([requests[r] for r in padded], self.slots)
        new = _prefill(self.generator._plan, self.generator._params, new).replace(policy=())
        # A repeated row writes the same request's values twice.
        first = jnp.asarray([padded.index(r) for r in padded])
        new = jax.tree.map(lambda x: x[first], new)
        width = max(s.stop_ids.shape[1] for s in (self.state, new))
        old, new = (s.replace(stop_ids=_widen(s.stop_ids, width)) for s in (self.state, new))
        self.state = _insert(self.generator._plan, old, new, jnp.asarray(padded))
        self._requests |= requests
        self._fetch()

    def step(self, rounds: int = 1) -> None:
        """Runs up to `rounds` rounds on every running row."""
        plan, params = self.generator._plan, self.generator._params
        self.state = _round(plan, params, self.state) if rounds == 1 else _rounds(plan, params, self.state, rounds)
        self._fetch()

    def tokens(self, row: int) -> list[int]:
        """New tokens of a row so far."""
        n = len(self._requests[row].prompt)
        return np.asarray(self.state.tokens[row])[n : self._length[row]].tolist()

    def result(self, row: int) -> Generation:
        """The generation of a row."""
        s = self.state
        record = jax.device_get(jax.tree.map(lambda x: x[row], s.record))
        return self.generator._generation(
            np.asarray(s.tokens[row]), len(self._requests[row].prompt), self._length[row], self._finish[row],
            int(s.rounds[row]), record,
        )  # fmt: skip

    @property
    def running(self) -> np.ndarray:
        """[rows] booleans."""
        return self._finish == Finish.RUNNING

    def _fetch(self) -> None:
        self._length, self._finish = jax.device_get((self.state.length, self.state.finish))


def speculative_generate(
    target: Decoder,
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | Sequence[int] = 256,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    stop_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    seed: int | Sequence[int] | None = None,
    policy: Policy | None = None,
    block_size: int | None = None,
    max_length: int | None = None,
    confidence_scaling: Scaling | None = None,
) -> list[Generation]:
    """Generates for a batch of ragged prompts, drafting with `drafter` and keeping the target's exact law.

    Args:
      target, drafter: the models; drafter None is plain decoding.
      prompts: token ids, one list a row.
      max_tokens, temperature, top_k, top_p, min_p: one value, or one a row.
      seed: one seed (row i uses seed + i), one a row, or None for fresh ones.
      policy, block_size, max_length, confidence_scaling: see `Generator`.

    Raises:
      ValueError: an empty or too long prompt, or a parameter out of range.
    """
    n = len(prompts)
    seeds = [int(seed) + i for i in range(n)] if isinstance(seed, Integral) else seed

    def per_row(name: str, value) -> list:
        values = list(value) if np.ndim(value) else [value] * n
        if len(values) != n:
            raise ValueError(f"{name} needs one value or one a prompt ({n}), got {len(values)}.")
        return values

    columns = zip(
        prompts, per_row("max_tokens", max_tokens), per_row("temperature", temperature), per_row("top_k", top_k),
        per_row("top_p", top_p), per_row("min_p", min_p), per_row("seed", seeds), strict=True,
    )  # fmt: skip
    requests = [Request(p, m, t, k, tp, mp, stop_ids, ignore_eos, s) for p, m, t, k, tp, mp, s in columns]
    generator = Generator(
        target, drafter, policy=policy, block_size=block_size, max_length=max_length,
        confidence_scaling=confidence_scaling,
    )  # fmt: skip
    return generator.generate(requests)


def generate(target: Decoder, prompts: Sequence[Sequence[int]], **options: Any) -> list[Generation]:
    """Plain decoding with the options of `speculative_generate`: the baseline, and the law to keep."""
    return speculative_generate(target, None, prompts, **options)


def check_request(request: Request, config: TargetConfig, max_length: int) -> None:
    """Checks that a request can run within `max_length` positions; sampling parameters are `Sampling`'s to check.

    Raises:
      ValueError: it cannot.
    """
    prompt = np.asarray(request.prompt)
    if prompt.ndim != 1:
        raise ValueError(f"a prompt must be one list of token ids, got {request.prompt!r:.60}.")
    if not len(prompt):
        raise ValueError("the prompt is empty; expected at least one token id.")
    if not np.issubdtype(prompt.dtype, np.integer):
        raise ValueError(f"the prompt must be token ids, got dtype {prompt.dtype}; encode text with the tokenizer.")
    if prompt.min() < 0 or prompt.max() >= config.vocab_size:
        raise ValueError(f"prompt ids must be within 0..{config.vocab_size - 1}, got {prompt.min()}..{prompt.max()}.")
    if not isinstance(request.max_tokens, Integral) or request.max_tokens < 1:
        raise ValueError(f"max_tokens must be a whole number of at least 1, got {request.max_tokens!r}.")
    ids, known = request.stop_ids, range(config.vocab_size)
    if not isinstance(ids, Collection) or not all(isinstance(i, Integral) and i in known for i in ids):
        raise ValueError(f"stop_ids must be a list of token ids within 0..{known[-1]}, got {ids!r:.60}.")
    seed = request.seed
    if seed is not None and not (isinstance(seed, Integral) and -(2**63) <= seed < 2**64):
        raise ValueError(f"seed must be an integer of 64 bits or None, got {seed!r}.")
    if len(prompt) >= max_length:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens; at most {max_length - 1} fit, so that one can be generated. "
            "Shorten it or raise max_length."
        )


def stop_ids_of(request: Request, config: TargetConfig) -> list[int]:
    """Ids that end a request's answer: its own, and the target's unless it ignores them."""
    return sorted({*request.stop_ids, *(() if request.ignore_eos else config.stop_ids)})


def check_pair(target: Decoder, drafter: Any) -> None:
    """Checks that a drafter was made for a target of these shapes.

    Raises:
      ValueError: hidden size, vocabulary or depth differ, or the target has no such taps.
    """
    t, d = target.config, drafter.config
    pairs = {
        "hidden size": (d.hidden_size, t.hidden_size),
        "vocabulary": (d.vocab_size, t.vocab_size),
        "target depth": (d.num_target_layers, t.num_layers),
    }
    wrong = [f"{name} {theirs} of the drafter, {ours} of the target" for name, (theirs, ours) in pairs.items()
             if theirs != ours]  # fmt: skip
    if wrong:
        raise ValueError(f"drafter and target do not fit: {'; '.join(wrong)}. Use a drafter trained for this target.")
    if not d.reads_final_hidden:
        check_taps(d.tap_ids, t.num_layers)


def warn_if_useless(generations: Sequence[Generation]) -> None:
    """Logs a hint when many rounds had nearly every draft rejected: output stays exact, but nothing is gained."""
    accepted = np.concatenate([g.accepted[g.scheduled > 0] for g in generations])
    if len(accepted) >= USELESS_ROUNDS and (mean := 1 + accepted.mean()) < USELESS:
        log.warning(
            "mean accepted length %.2f over %d rounds: nearly every draft was rejected. Check that the drafter was "
            "trained for this very target, and with the chat template and thinking mode of this prompt.",
            mean, len(accepted),
        )  # fmt: skip


def whole_chunks(positions: int) -> int:
    """Cache slots for `positions`: the next multiple of CHUNK."""
    return -(-positions // CHUNK) * CHUNK


def _widen(stop_ids: jax.Array, width: int) -> jax.Array:
    missing = width - stop_ids.shape[1]
    return jnp.pad(stop_ids, ((0, 0), (0, missing)), constant_values=-1) if missing else stop_ids


def _row(tree, i: int):
    return jax.tree.map(lambda x: x[i], tree)
