"""AdamW or Muon under one schedule, and the average of the parameters over the run."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from train.config import RunConfig


def optimizer(run: RunConfig) -> optax.GradientTransformation:
    """AdamW or Muon with warm-up, cosine decay to zero and clipping by global norm; last an average, if asked for."""
    warmup = max(int(run.warmup * run.steps), 1)
    rate = optax.warmup_cosine_decay_schedule(0.0, run.learning_rate, warmup, max(run.steps, warmup + 1))
    update = adam = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=run.weight_decay)
    if run.optimizer == "muon":
        muon = optax.contrib.muon(rate, weight_decay=run.weight_decay, consistent_rms=0.2)
        update = optax.partition({"muon": muon, "adam": adam}, _kinds)
    average = [parameter_average(run.ema)] if run.ema else []
    return optax.chain(optax.clip_by_global_norm(run.clip), update, *average)


class Average(NamedTuple):
    """The state of `parameter_average`.

    Attributes:
      count: updates seen; params: the average, like the parameters.
    """

    count: jax.Array
    params: Any


def parameter_average(decay: float) -> optax.GradientTransformation:
    """Keeps the mean of the parameters after each update, weighing an update `decay` times the one after it.

    Changes no update; must come last in a chain. The initial parameters have no part in the mean.
    """

    def init(params):
        return Average(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params))

    def update(updates, state, params):
        count = state.count + 1
        rate = (1 - decay) / (1 - decay**count)  # 1 at first, 1 - decay in the end
        after = optax.apply_updates(params, updates)
        return updates, Average(count, jax.tree.map(lambda a, b: a + rate * (b - a), state.params, after))

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _kinds(params: nnx.State) -> nnx.State:
    """Which parameters are matrices of the backbone: those are orthogonalised."""

    def kind(path, value):
        return "muon" if value.ndim == 2 and {"layers", "layer", "fc"} & set(path) else "adam"

    return nnx.map_state(lambda path, variable: variable.replace(kind(path, variable)), params)
