"""Scheduling: what a decision costs, and how far each policy stays behind an oracle.

    python -m benchmarks.schedule
    python -m benchmarks.schedule --table costs.json --records rounds.npz

The first prints the time of a decision for 512 requests against a plain Python loop, and for 8 requests against a plain
decoding step of the models. With a table of `dspark profile` and records of `dspark evaluate --records` (whole blocks
verified) it also simulates the recorded rounds on that table, at several numbers of requests.
"""

import dataclasses
import math
import os
import platform
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from dspark_jax.calibration.records import Records, read_records
from dspark_jax.calibration.scaling import fit_scaling
from dspark_jax.calibration.survival import sigmoid, to_survival
from dspark_jax.cli.models import ModelOptions
from dspark_jax.scheduling import (
    EarlyStop,
    Fixed,
    Gate,
    LaggedCapacity,
    Oracle,
    Outcome,
    Plain,
    Policy,
    Round,
    Stairs,
    StepCosts,
    Threshold,
    load_costs,
    while_it_pays,
)
from dspark_jax.scheduling.profile import profile
from dspark_jax.scheduling.simulate import Blocks, simulate

console = Console(width=140)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Measure scheduling.

    Attributes:
      table, records: simulate these rounds on this cost table (`--costs` is what `dspark generate` goes by).
      requests: how many side by side in the simulation.
      rounds: simulated.
      temperature: records sampled at this temperature only; all when absent.
      speed: also measure the time of decisions.
    """

    models: Annotated[ModelOptions, tyro.conf.OmitArgPrefixes] = dataclasses.field(default_factory=ModelOptions)
    table: str | None = None
    records: str | None = None
    requests: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    rounds: int = 400
    temperature: float | None = None
    speed: bool = True


def main(options: Schedule) -> None:
    """Prints the tables."""
    versions = f"python {platform.python_version()}, jax {jax.__version__}, flax {flax.__version__}"
    console.print(f"{jax.devices()[0].device_kind} x{jax.device_count()}, {os.cpu_count()} cores, {versions}")
    if options.speed:
        console.print(against_a_loop(512, 7))
        console.print(against_a_step(options.models, 8))
    if options.table is not None and options.records is not None:
        records = read_records(options.records)
        if options.temperature is not None:
            records = records.where(records.temperature == np.float32(options.temperature))
        console.print(gaps(load_costs(options.table).at(), records, options.requests, options.rounds))


def against_a_loop(r: int, g: int) -> Table:
    """Milliseconds of a decision, from confidence logits to lengths, jitted and in plain Python, by turns."""
    logits, before = np.random.default_rng(0).normal(2, 1.5, (2, r, g)).astype(np.float32)
    sizes = tuple(range(r // 8, r * (g + 1) + 1, r // 8))
    table = Table(title=f"milliseconds a decision, {r} requests x {g} drafts, medians")
    for column in ("", "drafts admitted", "jitted", "plain Python", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for label, seconds_a_token in (("tokens are cheap", 1e-7), ("tokens are dear", 2e-5)):
        costs = StepCosts((Stairs(r, sizes, tuple(0.02 + seconds_a_token * n for n in sizes), 0.002),))
        for policy in (EarlyStop(costs), LaggedCapacity(costs)):
            state = policy.initial_state(r, g)
            for _ in range(2):
                state = policy.update(state, *history(before))
            jitted = partial(decision(policy, logits), state)
            python = partial(loop, logits, before, sizes, costs, lagged=isinstance(policy, LaggedCapacity))
            lengths = python()
            assert jitted().tolist() == lengths, "both must decide the same"
            pairs = [(timed(jitted), timed(python)) for _ in range(50)]
            fast, slow = (statistics.median(side) for side in zip(*pairs, strict=True))
            row = (str(sum(lengths)), f"{1e3 * fast:.3f}", f"{1e3 * slow:.2f}", f"{slow / fast:.0f}x")
            table.add_row(f"{name(policy)}, {label}", *row)
    return table


def against_a_step(models: ModelOptions, r: int) -> Table:
    """A decision as a share of one plain decoding step of r requests."""
    target, drafter = models.load()
    if drafter is None:
        raise ValueError("the benchmark needs a drafter; it is --drafter none now.")
    g = drafter.config.block_size
    measured = profile(target.model, drafter, rows=(r,), widths=(1,))
    step = measured.at().stairs[0].verify_seconds[0]
    sizes = tuple(range(1, r * (g + 1) + 1))
    costs = StepCosts((Stairs(r, sizes, tuple(step + 1e-4 * n for n in sizes)),))
    logits = np.random.default_rng(0).normal(2, 1.5, (r, g)).astype(np.float32)
    table = Table(title=f"{r} requests x {g} drafts against a plain step of {1e3 * step:.1f} ms")
    for column in ("", "ms a decision", "share of the step"):
        table.add_column(column, justify="left" if not column else "right")
    for policy in (EarlyStop(costs), Gate(LaggedCapacity(costs), costs)):
        decide = partial(decision(policy, logits), policy.initial_state(r, g))
        decide()
        seconds = statistics.median(timed(decide) for _ in range(50))
        table.add_row(name(policy), f"{1e3 * seconds:.3f}", f"{100 * seconds / step:.2f} %")
    return table


def history(logits: np.ndarray) -> tuple[Round, Outcome]:
    """A round with these confidences, nothing accepted."""
    r, g = logits.shape
    nothing = jnp.zeros(r, jnp.int32)
    return Round(jnp.ones(r, bool), jnp.full(r, g)), Outcome(to_survival(jnp.asarray(logits)), nothing, nothing)


def decision(policy: Policy, logits: np.ndarray) -> Callable[[Any], np.ndarray]:
    """One jitted decision by the policy's state: whether to draft, and lengths."""
    round, known = history(logits)[0], jnp.asarray(logits)

    @jax.jit
    def decide(logits, round, state):
        return policy.drafts(round, state), policy.lengths(to_survival(logits), round, state)

    return lambda state: np.asarray(decide(known, round, state)[1])


def loop(logits: np.ndarray, past: np.ndarray, sizes: Sequence[int], costs: StepCosts, *, lagged: bool) -> list[int]:
    """The same decision as Algorithm 1 is printed: one candidate after another, all lengths noted where Theta rises."""
    r, stairs = len(logits), costs.stairs[0]
    seconds = [s + stairs.draft_seconds for s in stairs.verify_seconds]

    def walk(logits: np.ndarray, early_stop: bool) -> tuple[list[tuple[float, int, int]], list[int]]:
        """Candidates in order, and the best lengths."""
        pool = []
        for request, row in enumerate(logits.tolist()):
            survival = 1.0
            for position, z in enumerate(row, 1):
                survival /= 1 + math.exp(-z)
                pool.append((-survival, position, request))
        pool.sort()
        tokens, tau, lengths = r, float(r), [0] * r
        best, chosen = tau / seconds[bisect_left(sizes, tokens)], lengths.copy()
        for worth, position, request in pool:
            lengths[request] = position
            tokens, tau = tokens + 1, tau - worth
            theta = tau / seconds[bisect_left(sizes, tokens)]
            if theta > best:
                best, chosen = theta, lengths.copy()
            elif early_stop:
                break
        return pool, chosen

    if not lagged:
        return walk(logits, early_stop=True)[1]
    tokens = sizes[bisect_left(sizes, r + sum(walk(past, early_stop=False)[1]))]
    lengths = [0] * r
    for _, position, request in walk(logits, early_stop=True)[0][: tokens - r]:
        lengths[request] = position
    return lengths


def gaps(costs: StepCosts, records: Records, requests: Sequence[int], rounds: int) -> Table:
    """Throughput of every policy as a share of the oracle's, on recorded rounds."""
    records = records.where(records.scheduled == records.block_size)
    g, parts = records.block_size, [records.of_domain(d) for d in records.domains]
    shortest = min(map(len, parts))
    scaling = fit_scaling(records, shifts=True).scaling
    confidence = [sigmoid(scaling(part.confidence_logits[:shortest].astype(np.float64))) for part in parts]
    blocks = Blocks.recorded(confidence, [part.accepted[:shortest] for part in parts])
    families: dict[str, list[Policy]] = {
        "none": [Plain()],
        "best fixed": [Fixed(n) for n in range(1, g + 1)],
        "best threshold": [Threshold(t) for t in (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)],
        "EarlyStop": [EarlyStop(costs)],
        "LaggedCapacity": [LaggedCapacity(costs)],
        "LaggedCapacity, memory 0.9": [LaggedCapacity(costs, memory=0.9)],
        "Gate, EarlyStop": [Gate(EarlyStop(costs), costs)],
        "Gate, LaggedCapacity 0.9": [while_it_pays(costs)],
        # An oracle knows the survival of drafts only once it has drafted; under load not to draft may be better.
        "oracle": [Oracle(costs), Plain()],
    }
    table = Table(title=f"tokens/s over the oracle's, {shortest} rounds a domain of {', '.join(records.domains)}")
    table.add_column("")
    rows: dict[str, list[float]] = {label: [] for label in families}
    for n in requests:
        table.add_column(f"{n}", justify="right")
        for label, policies in families.items():
            loads = [simulate(policy, costs, blocks, rows=n, rounds=rounds) for policy in policies]
            rows[label].append(max(load.throughput for load in loads))
    for label, throughputs in rows.items():
        pairs = zip(throughputs, rows["oracle"], strict=True)
        shares = [f"{t:.1f} tok/s" if label == "oracle" else f"{t / best:.3f}" for t, best in pairs]
        table.add_row(label, *shares)
    return table


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def name(policy: Policy) -> str:
    """Its class, and that of the policy behind it."""
    inner = getattr(policy, "policy", None)
    return type(policy).__name__ + (f", {type(inner).__name__}" if inner else "")


if __name__ == "__main__":
    main(tyro.cli(Schedule, config=(tyro.conf.OmitSubcommandPrefixes,)))
