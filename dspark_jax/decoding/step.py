"""The two steps generation is made of: prefill and round. Pure functions of (models, state)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.calibration.survival import Scaling, to_survival
from dspark_jax.decoding.keys import Purpose, slot_key, slot_keys
from dspark_jax.decoding.sampling import draw
from dspark_jax.decoding.state import State
from dspark_jax.decoding.verify import verify
from dspark_jax.drafters.protocol import Proposal
from dspark_jax.models.decoder import Decoder
from dspark_jax.scheduling.policies import Outcome, Policy
from dspark_jax.scheduling.pool import Round


@dataclasses.dataclass(frozen=True)
class Models:
    """What a step runs: a target, and a drafter with the head it scores with (None: plain decoding)."""

    target: Decoder
    drafter: Any = None
    draft_head: jax.Array | None = None

    @property
    def tap_ids(self) -> tuple[int, ...]:
        return () if self.drafter is None else self.drafter.config.tap_ids

    def run(self, state: State, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, State]:
        """Target over tokens [b, t]; extends both caches and returns hidden states [b, t, d]."""
        hidden, taps, cache = self.target(tokens, positions, state.cache, self.tap_ids)
        draft_cache = state.draft_cache
        if self.drafter is not None:
            read = hidden if self.drafter.config.reads_final_hidden else taps
            draft_cache = self.drafter.extend(draft_cache, read, positions, self.target.embed(tokens))
        return hidden, state.replace(cache=cache, draft_cache=draft_cache)


def prefill(models: Models, state: State, chunk: int) -> State:
    """Runs all prompts in chunks and draws the first token of each row.

    The trip count follows the longest prompt, so one program serves every mix of prompt lengths.
    """
    n = state.prompt_length
    hidden = jnp.zeros((n.shape[0], models.target.config.hidden_size), models.target.dtype)

    def body(carry):
        i, hidden, state = carry
        tokens = jax.lax.dynamic_slice_in_dim(state.tokens, i * chunk, chunk, axis=1)
        positions = jnp.broadcast_to(i * chunk + jnp.arange(chunk), tokens.shape)
        out, state = models.run(state, tokens, jnp.where(positions < n[:, None], positions, -1))
        last = jnp.clip(n - 1 - i * chunk, 0, chunk - 1)
        here = (n - 1) // chunk == i
        rows = jnp.arange(n.shape[0])
        return i + 1, jnp.where(here[:, None], out[rows, last], hidden), state

    chunks = (jnp.max(n) + chunk - 1) // chunk
    _, hidden, state = jax.lax.while_loop(lambda c: c[0] < chunks, body, (0, hidden, state))
    keys = slot_key(state.keys, n - 1, Purpose.BONUS, 0)
    token, _ = draw(models.target.logits(hidden), state.sampling, keys)
    return state.commit(token[:, None], jnp.ones_like(n))


def plain_round(models: Models, state: State) -> State:
    """One token a row."""
    position = state.length - 1
    anchor = jnp.take_along_axis(state.tokens, position[:, None], axis=1)
    hidden, state = models.run(state, anchor, position[:, None])
    keys = slot_key(state.keys, position, Purpose.BONUS, 0)
    token, _ = draw(models.target.logits(hidden[:, 0]), state.sampling, keys)
    rounds = state.rounds + state.running
    return state.commit(token[:, None], jnp.ones_like(position)).replace(rounds=rounds)


def speculative_round(
    models: Models, state: State, policy: Policy, block_size: int, scaling: Scaling | None = None
) -> State:
    """One round as the policy wants it: drafted and verified, or plain.

    Args:
      scaling: of confidence logits; None takes them as they are.
    """
    widths = policy.widths(state.length.shape[0], block_size)
    room = jnp.clip(state.limit - state.length - 1, 0, widths[-1] - 1)
    round = Round(state.running, room, padded=True)

    def drafted(state: State) -> State:
        return drafted_round(models, state, policy, round, block_size, scaling)

    def undrafted(state: State) -> State:
        return undrafted_round(models, state, policy, round)

    worth = policy.drafts(round, state.policy)
    if isinstance(worth, bool):
        return drafted(state) if worth else undrafted(state)
    return jax.lax.cond(worth, drafted, undrafted, state)


def undrafted_round(models: Models, state: State, policy: Policy, round: Round) -> State:
    """A plain round of a batch that may draft: the drafter's context goes on, the record has no drafts."""
    b, _, g = state.record.drafts.shape
    nothing = jnp.zeros(b, jnp.int32)
    drafts, confidences = jnp.full((b, g), -1, jnp.int32), jnp.full((b, g), jnp.nan)
    noted = _note(state, nothing, nothing, drafts, confidences)
    return plain_round(models, state).replace(**noted, policy=policy.update(state.policy, round, None))


def drafted_round(
    models: Models,
    state: State,
    policy: Policy,
    round: Round,
    block_size: int,
    scaling: Scaling | None = None,
) -> State:
    """Drafts a block, verifies a prefix of it, commits what is accepted and the token after it."""
    position = state.length - 1
    anchor = jnp.take_along_axis(state.tokens, position[:, None], axis=1)[:, 0]
    keys = slot_keys(state.keys, position, Purpose.DRAFT, block_size)
    proposal, draft_cache = models.drafter.propose(
        models.target, models.draft_head, state.draft_cache, anchor, position, state.sampling, keys, block_size
    )
    state = state.replace(draft_cache=draft_cache)
    survival = to_survival(proposal.confidence_logits, scaling)
    lengths = policy.lengths(survival, round, state.policy)
    widths = policy.widths(len(position), block_size)

    def at_width(width: int):
        def run(state: State, proposal: Proposal) -> tuple[State, jax.Array, jax.Array]:
            tokens = jnp.concatenate([anchor[:, None], proposal.tokens[:, : width - 1]], axis=1)
            hidden, state = models.run(state, tokens, position[:, None] + jnp.arange(width))
            logits = models.target.logits(hidden)
            accepted, token = verify(logits, proposal, lengths, state.sampling, state.keys, position)
            return state, accepted, token

        return run

    branch = jnp.searchsorted(jnp.asarray(widths), jnp.max(lengths) + 1)
    state, accepted, token = jax.lax.switch(branch, [at_width(w) for w in widths], state, proposal)
    slots = jnp.arange(block_size + 1)
    block = jnp.where(slots < accepted[:, None], jnp.pad(proposal.tokens, ((0, 0), (0, 1))), token[:, None])
    outcome = Outcome(survival, lengths, accepted)
    committed = state.commit(block, accepted + 1).replace(policy=policy.update(state.policy, round, outcome))
    # Drafts behind a stop id were never emitted: neither accepted nor rejected.
    emitted = committed.length - state.length
    cut = emitted <= accepted
    accepted, lengths = jnp.where(cut, emitted, accepted), jnp.where(cut, emitted, lengths)
    return committed.replace(**_note(state, accepted, lengths, proposal.tokens, proposal.confidence_logits))


def _note(
    state: State, accepted: jax.Array, lengths: jax.Array, drafts: jax.Array, confidences: jax.Array
) -> dict[str, Any]:
    """The fields of a state whose running rows went through one more round."""
    rows = jnp.arange(accepted.shape[0])
    where = jnp.where(state.running, state.rounds, state.record.accepted.shape[1])
    record = dataclasses.replace(
        state.record,
        accepted=state.record.accepted.at[rows, where].set(accepted.astype(jnp.int8), mode="drop"),
        scheduled=state.record.scheduled.at[rows, where].set(lengths.astype(jnp.int8), mode="drop"),
        confidences=state.record.confidences.at[rows, where].set(confidences, mode="drop"),
        drafts=state.record.drafts.at[rows, where].set(drafts, mode="drop"),
    )
    return {"record": record, "rounds": state.rounds + state.running}
