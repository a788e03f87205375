"""What a step may verify: a policy of `dspark_jax.scheduling`, asked before the last step is read."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.scheduling import Fixed, Gate, LaggedCapacity, Outcome, Plain, Policy, Round, Threshold


class Budget:
    """The host's side of a policy.

    A step is dispatched before the last one is read, so its size must come from older steps: from their survival and
    from what was accepted. Which drafts fill it is decided on the device, by this step's survival.
    """

    def __init__(self, policy: Policy, slots: int, block_size: int):
        """Raises:
        ValueError: the policy needs this step's survival for its size.
        """
        inner = policy.policy if isinstance(policy, Gate) else policy
        if not isinstance(inner, Fixed | Threshold | Plain | LaggedCapacity):
            raise ValueError(f"{type(inner).__name__} sizes a step by its own survival; a server must know it before.")
        self.policy, self._inner, self._g = policy, inner, block_size
        self.threshold = inner.survival if isinstance(inner, Threshold) else 0.0
        length = inner.length if isinstance(inner, Fixed) else None
        self.most = block_size if length is None else min(length, block_size)
        self.floor = inner.floor if isinstance(inner, LaggedCapacity) else 0
        # Decisions of the host: never on the accelerator, whose queue they would wait in.
        self._device = jax.devices("cpu")[0]
        with jax.default_device(self._device):
            self.state = policy.initial_state(slots, block_size)
        self._survival = np.full((slots, block_size), np.nan)
        self._decide = jax.jit(partial(_decide, policy))
        self._update = jax.jit(policy.update)

    def warm_up(self) -> None:
        """Compiles what decides; it knows nothing more than before."""
        known, running, room = self.state, np.ones(len(self._survival), bool), np.zeros(len(self._survival), np.int32)
        for outcome in (None, Outcome(np.zeros_like(self._survival, np.float32), room, room)):  # pyright: ignore[reportArgumentType]
            self.choose(running, room)
            self.update(running, room, outcome)
        self.enter(0)
        self.state, self._survival[:] = known, np.nan

    def choose(self, running: np.ndarray, room: np.ndarray) -> tuple[bool, int]:
        """Whether to draft for the slots `running` [s], with `room` [s] drafts each, and how many drafts to verify."""
        if isinstance(self._inner, Plain) or not running.any():
            return False, 0
        if isinstance(self._inner, Fixed):
            return self.most > 0, int(np.minimum(room, self.most)[running].sum())
        if isinstance(self._inner, Threshold):
            # As many as passed when last seen; a slot that was not seen yet may need all.
            passed = np.where(np.isnan(self._survival), True, self._survival >= self.threshold).sum(1)
            return True, int(np.minimum(passed, room)[running].sum())
        drafts, admitted = self._decide(*self._put((self._round(running, room), self.state)))
        return bool(drafts), int(admitted)

    def update(self, running: np.ndarray, room: np.ndarray, outcome: Outcome | None) -> None:
        """Tells the policy of a step that was read; the slots `running` took part, `outcome` is None without drafts."""
        if outcome is not None:
            self._survival[running] = np.asarray(outcome.survival)[running]
        self.state = self._update(*self._put((self.state, self._round(running, room), outcome)))

    def enter(self, slot: int) -> None:
        """A new request has taken a slot."""
        self._survival[slot] = np.nan
        fresh = np.zeros(len(self._survival), bool)
        fresh[slot] = True
        with jax.default_device(self._device):
            self.state = self.policy.renew(self.state, jnp.asarray(fresh))

    def _round(self, running: np.ndarray, room: np.ndarray) -> Round:
        return Round(running, room.astype(np.int32))  # pyright: ignore[reportArgumentType]

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, self._device)


def _decide(policy: Policy, round: Round, state: Any) -> tuple[jax.Array, jax.Array]:
    inner, lagged = (policy.policy, state.inner) if isinstance(policy, Gate) else (policy, state)
    assert isinstance(inner, LaggedCapacity)
    return jnp.asarray(policy.drafts(round, state)), inner.capacity(round, lagged)
