"""The programs a step is made of: draft a block for some slots; run a stream of tokens, verify, commit."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.calibration.survival import Scaling, to_survival
from dspark_jax.decoding.keys import Purpose, slot_key, slot_keys
from dspark_jax.decoding.sampling import choose, distribution
from dspark_jax.decoding.state import Finish, until_stop
from dspark_jax.decoding.verify import residual, spread
from dspark_jax.scheduling.pool import SURE, admit
from serve.engine.attention import Implementation
from serve.engine.logits import changed, logprobs_of
from serve.engine.paged import Markers, PagedCache, place
from serve.engine.state import Slots, Terms


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static half of the programs.

    Attributes:
      target, drafter: graphs of the models; drafter None is plain decoding.
      block_size: drafts of a round; scaling: of confidence logits, None takes them as they are.
      page_size: positions a page.
      attention: see `serve.engine.attention`; None picks by backend.
    """

    target: Any
    drafter: Any
    block_size: int
    page_size: int
    scaling: Scaling | None = None
    attention: Implementation | None = None

    def cache(self, pages: tuple[jax.Array, ...], markers: Markers) -> PagedCache:
        """Pages as a step sees them; a sequence has a block and its anchor in the stream, but for prompts."""
        return PagedCache(pages, markers, self.block_size + 1, self.attention)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Orders:
    """What the host decides about one step: NumPy arrays there, JAX arrays in a program.

    Attributes:
      order: [s] all slots: those that decode first, then those that only prefill, then the rest.
      prefill: [s] tokens before the anchor to compute; decode: [s] whether the anchor is computed and a token drawn.
      drafted: [s] whether the slot's drafts are of this step.
      page_indices: [s, pages]; 0 where there is none.
      budget: [] drafts to verify in all; most: [] of one slot; floor: [] of every slot first; threshold: [] survival
        below which none is.
    """

    order: Any
    prefill: Any
    decode: Any
    drafted: Any
    page_indices: Any
    budget: Any
    most: Any
    floor: Any
    threshold: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Results:
    """What came of a step, by slot.

    Attributes:
      block: [s, g + 1] tokens, of which the first `count` [s] were emitted; finish: [s].
      accepted, verified: [s] drafts, none behind a stop id.
      survival: [s, g] of the blocks drafted.
      logprobs: [s, g + 1] of the tokens; top_ids, top: [s, g + 1, TOP]; all void where nobody wants them.
    """

    block: jax.Array
    count: jax.Array
    finish: jax.Array
    accepted: jax.Array
    verified: jax.Array
    survival: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top: jax.Array

    @property
    def used(self) -> int:
        """Places of the program that were anchors or drafts, once the arrays are on the host."""
        return int((self.count > 0).sum() + self.verified.sum())


@partial(jax.jit, donate_argnames="slots")
def enter(
    slots: Slots, slot: jax.Array, terms: Terms, tokens: jax.Array, length: jax.Array, computed: jax.Array
) -> Slots:
    """Puts a request into a slot: its tokens [positions], `length` of them known, the first `computed` in its pages."""
    return slots.replace(
        terms=jax.tree.map(lambda all, one: all.at[slot].set(one), slots.terms, terms),
        tokens=slots.tokens.at[slot].set(tokens),
        length=slots.length.at[slot].set(length),
        computed=slots.computed.at[slot].set(computed),
        finish=slots.finish.at[slot].set(Finish.RUNNING),
    ).settled()


@partial(jax.jit, static_argnames=("plan", "rows"), donate_argnames="slots")
def draft(plan: Plan, params, slots: Slots, order: jax.Array, page_indices: jax.Array, rows: int) -> Slots:
    """Drafts a block for each of the first `rows` slots of `order`."""
    target, drafter, head = _models(plan, params)
    at = order[:rows]
    position = slots.length[at] - 1
    anchor = slots.tokens[at, position]
    terms = jax.tree.map(lambda x: x[at], slots.terms)
    width = drafter.config.block_size + drafter.config.first_slot
    markers = Markers.blocks(page_indices[at], position, width, plan.page_size)
    keys = slot_keys(terms.keys, position, Purpose.DRAFT, plan.block_size)
    proposal, cache = drafter.propose(
        target, head, plan.cache(slots.draft_pages, markers), anchor, position, terms.sampling, keys, plan.block_size
    )
    return slots.replace(
        drafts=slots.drafts.at[at].set(proposal.tokens),
        probs=slots.probs.at[at[:, None] * plan.block_size + jnp.arange(plan.block_size)].set(proposal.probs),
        confidence=slots.confidence.at[at].set(proposal.confidence_logits),
        draft_pages=cache.pages,
    ).settled()


@partial(jax.jit, static_argnames=("plan", "rows", "extra"), donate_argnames="slots")
def run(plan: Plan, params, slots: Slots, orders: Orders, rows: int, extra: int) -> tuple[Slots, Results]:
    """Runs the target over one stream of tokens, parts of prompts, anchors and admitted drafts, and commits what holds.

    Args:
      rows: most tokens that need logits: anchors and drafts; extra: most tokens of prompts before their last one.
    """
    target, drafter, _ = _models(plan, params)
    s, g = slots.drafts.shape
    t = rows + extra
    survival = to_survival(slots.confidence, plan.scaling)
    running = orders.decode & slots.running
    lengths = _lengths(slots, orders, survival, running, rows)
    # Sequences with tokens first, in the host's order.
    decode = jnp.where(running, 1 + lengths, 0)
    count = (orders.prefill + decode)[orders.order]
    order = orders.order[jnp.argsort(count == 0, stable=True)[: min(s, t)]]
    decode, count = decode[order], (orders.prefill + decode)[order]
    stream = _Packed.of(count, t)
    slot = order[stream.owner]
    positions = jnp.where(stream.real, slots.computed[slot] + stream.within, 0)
    ahead = positions - slots.length[slot]
    tokens = jnp.where(ahead < 0, slots.tokens[slot, positions], slots.drafts[slot, jnp.clip(ahead, 0, g - 1)])
    places = place(orders.page_indices[slot], positions[:, None], plan.page_size)[:, 0]
    markers = Markers(
        where=jnp.where(stream.real, places, 0),
        kv_lens=slots.computed[order] + count,
        page_indices=orders.page_indices[order],
        cu_q_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), stream.ends]),
        num_seqs=jnp.sum(count > 0, dtype=jnp.int32)[None],
    )
    cache = plan.cache(slots.pages, markers)
    hidden, taps, cache = target(tokens[None], positions[None], cache, drafter.config.tap_ids if drafter else ())
    slots = slots.replace(pages=cache.pages)
    if drafter:
        context = drafter.extend(plan.cache(slots.draft_pages, markers), taps, positions[None])
        slots = slots.replace(draft_pages=context.pages)
    first = (stream.ends - decode)[: min(s, rows)]
    order, decode = order[: min(s, rows)], decode[: min(s, rows)]
    row = _Packed.of(decode, rows)
    logits = target.logits(hidden[0, jnp.minimum(first[row.owner] + row.within, t - 1)])
    accepted, token = _verify(slots, drafter, order, decode, row, logits)
    drafts = jnp.pad(slots.drafts[order], ((0, 0), (0, 1)))
    block = jnp.where(jnp.arange(g + 1) < accepted[:, None], drafts, token[:, None])
    return _commit(slots, orders, order, decode, block, accepted, survival, row, logits)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Packed:
    """Sequences one behind the other.

    Attributes:
      ends: [r]; owner: [n] sequence of each place, within: [n] its number in it; real: [n] whether there is any.
    """

    ends: jax.Array
    owner: jax.Array
    within: jax.Array
    real: jax.Array

    @classmethod
    def of(cls, count: jax.Array, places: int) -> "_Packed":
        """`count` [r] places each, of which at most `places` in all."""
        ends, at = jnp.cumsum(count, dtype=jnp.int32), jnp.arange(places)
        owner = jnp.minimum(jnp.searchsorted(ends, at, side="right"), len(count) - 1)
        return cls(ends, owner, at - (ends - count)[owner], at < ends[-1])


def _models(plan: Plan, params) -> tuple[Any, Any, Any]:
    target, drafter, head = params
    return nnx.merge(plan.target, target), plan.drafter and nnx.merge(plan.drafter, drafter), head


def _lengths(slots: Slots, orders: Orders, survival: jax.Array, running: jax.Array, rows: int) -> jax.Array:
    """Drafts [s] to verify: the likeliest of this step's blocks, as many as the host gives and the program holds."""
    g = survival.shape[1]
    room = jnp.minimum(slots.terms.limit - slots.length - 1, orders.most)
    may = running & orders.drafted & slots.terms.speculative
    fits = may[:, None] & (jnp.arange(g) < room[:, None]) & (survival >= orders.threshold) & (survival > 0)
    value = jax.lax.cummin(jnp.where(fits, survival, 0), axis=1)
    value = jnp.where(fits & (jnp.arange(g) < orders.floor), SURE, value)
    left = rows - jnp.sum(running, dtype=jnp.int32)
    budget = jnp.minimum(jnp.minimum(orders.budget, left), jnp.sum(value > 0, dtype=jnp.int32))
    return admit(value, budget)


def _verify(
    slots: Slots, drafter: Any, order: jax.Array, decode: jax.Array, row: _Packed, logits: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Accepted drafts [n] and the next token [n] of the sequences in slots `order` [n].

    As `dspark_jax.decoding.verify`, but for rows of one stream.

    Args:
      decode: [n] rows of each, 1 + drafts, or 0; logits: [rows, v].
    """
    n, g = len(order), slots.drafts.shape[1]
    slot, k = order[row.owner], jnp.minimum(row.within, g - 1)
    terms = jax.tree.map(lambda x: x[slot], slots.terms)
    position = slots.length - 1
    logits = changed(logits, slots, slot, row.within)
    draft, tested = slots.drafts[slot, k], row.real & (row.within < decode[row.owner] - 1)
    first = row.ends - decode

    def prefix(good: jax.Array) -> jax.Array:
        grid = (
            jnp.zeros((n, g), jnp.int32).at[row.owner, jnp.where(tested, k, g)].set(good.astype(jnp.int32), mode="drop")
        )
        return jnp.sum(jnp.cumprod(grid, axis=1), axis=1)

    def last(accepted: jax.Array) -> jax.Array:
        return jnp.clip(first + accepted, 0, len(slot) - 1)

    def greedy():
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        accepted = prefix(best == draft)
        return accepted, best[last(accepted)]

    def sampled():
        p = distribution(logits, terms.sampling)
        ids = drafter.rows if drafter else None
        at = draft if ids is None else jnp.minimum(jnp.searchsorted(ids, draft), len(ids) - 1)
        chance = p[jnp.arange(len(slot)), draft] / jnp.maximum(slots.probs[slot * g + k, at], jnp.finfo(p.dtype).tiny)
        keys = slot_key(terms.keys, position[slot], Purpose.ACCEPT, row.within)
        accepted = prefix(jax.vmap(jax.random.uniform)(keys) < jnp.minimum(chance, 1))
        rejected = accepted < decode - 1
        q = spread(slots.probs[order * g + jnp.minimum(accepted, g - 1)], ids, logits.shape[-1])
        purpose = jnp.where(rejected, Purpose.RESIDUAL, Purpose.BONUS)
        keys = slot_key(slots.terms.keys[order], position[order], purpose, accepted)
        return accepted, choose(residual(p[last(accepted)], q, rejected), keys)

    some = jnp.any(~terms.sampling.greedy & row.real)
    return jax.lax.cond(some, sampled, greedy)


def _commit(slots, orders, order, decode, block, accepted, survival, row, logits) -> tuple[Slots, Results]:
    """Appends each sequence's block up to its first stop id and its limit; notes what happened by slot."""
    (s, g), k = slots.drafts.shape, jnp.arange(slots.drafts.shape[1] + 1)
    terms, length = jax.tree.map(lambda x: x[order], (slots.terms, slots.length))
    count = jnp.where(decode > 0, jnp.minimum(accepted + 1, terms.limit - length), 0)
    count, stopped = until_stop(block, count, terms.stop_ids)
    end = length + count
    finish = jnp.where(stopped, Finish.STOP, jnp.where(end >= terms.limit, Finish.LENGTH, Finish.RUNNING))
    finish = jnp.where(decode > 0, finish, slots.finish[order]).astype(slots.finish.dtype)
    columns = jnp.where(k < count[:, None], length[:, None] + k, slots.tokens.shape[1])
    computed = (
        (slots.computed + orders.prefill)
        .at[order]
        .set(jnp.where(decode > 0, end - 1, slots.computed[order] + orders.prefill[order]))
    )
    after = slots.replace(
        tokens=slots.tokens.at[order[:, None], columns].set(block, mode="drop"),
        length=slots.length.at[order].set(end),
        computed=computed,
        finish=slots.finish.at[order].set(finish),
    ).settled()
    # Drafts behind a stop id were never emitted: neither accepted nor rejected.
    verified = jnp.maximum(decode - 1, 0)
    cut = count <= accepted
    accepted, verified = jnp.where(cut, count, accepted), jnp.where(cut, count, verified)
    emitted = block[row.owner, jnp.minimum(row.within, g)]
    wanted = row.real & terms.logprobs[row.owner]
    own, ids, top = logprobs_of(logits, emitted, wanted)
    to = order[row.owner], jnp.where(row.real, row.within, g + 1)

    def by_slot(x: jax.Array) -> jax.Array:
        return jnp.zeros((s, *x.shape[1:]), x.dtype).at[order].set(x)

    def by_row(x: jax.Array) -> jax.Array:
        return jnp.zeros((s, g + 1, *x.shape[1:]), x.dtype).at[to].set(x, mode="drop")

    results = Results(
        by_slot(block), by_slot(count), after.finish, by_slot(accepted), by_slot(verified), survival,
        by_row(own), by_row(ids), by_row(top),
    )  # fmt: skip
    return after, results
