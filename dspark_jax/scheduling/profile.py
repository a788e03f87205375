"""Measures what steps cost, in the process and with the programs that generation runs."""

import hashlib
import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp

from dspark_jax.decoding.generate import Batch, Generator, Request, whole_chunks
from dspark_jax.decoding.state import State
from dspark_jax.models.decoder import Decoder
from dspark_jax.scheduling.costs import CostTable, Stairs, StepCosts
from dspark_jax.scheduling.policies import Fixed, Plain

log = logging.getLogger(__name__)

ROUNDS = 4
"""Rounds of one timing, run as one program, so that a call's own overhead is shared as it is in generation."""


def profile(
    target: Decoder,
    drafter: Any,
    *,
    rows: Sequence[int] = (1, 4),
    contexts: Sequence[int] = (512,),
    widths: Sequence[int] | None = None,
    block_size: int | None = None,
    repeats: int = 7,
    warm_up: int = 2,
    progress: Callable[[str], None] = lambda text: None,
) -> CostTable:
    """Measures plain and drafted rounds of every number of rows, verify width and cache length.

    A drafted round that verifies w tokens a row takes draft + verify(w) seconds, a plain one verify(1): the times are
    medians of whole rounds, with sampling, acceptance and cache updates, and drafting is what a drafted round of width
    1 takes beyond a plain one. Plain rounds and all widths take turns, so that a machine that slows down slows all.
    Cost depends on shapes alone, so what is drafted does not matter.

    Args:
      rows: requests side by side; contexts: cache positions a row, rounded up to whole chunks.
      widths: tokens a row to verify, anchor included; None takes powers of two and the whole block.
      block_size: drafts a round; None is what the drafter was trained for.
      repeats, warm_up: timings that count, and those before that do not.
      progress: hears what is measured next.

    Raises:
      ValueError: a number below 1, a width beyond the block, or a context too short for the rounds of a timing.
    """
    g = drafter.config.block_size if block_size is None else block_size
    widths = sorted({w for w in (1, 2, 4, 8, 16) if w <= g} | {g + 1}) if widths is None else sorted({1, *widths})
    if min(*rows, *contexts, *widths, repeats, 1 + warm_up) < 1 or widths[-1] > g + 1:
        raise ValueError(
            f"rows, contexts and repeats must be at least 1 and widths within 1..{g + 1}; got {list(rows)}, "
            f"{list(contexts)}, {repeats} and {widths}."
        )
    lengths = sorted({whole_chunks(n) for n in contexts})
    if lengths[0] <= ROUNDS * (g + 1) + 1:
        raise ValueError(f"contexts must be over {ROUNDS * (g + 1) + 1} positions, got {min(contexts)}.")
    table = []
    for context in lengths:
        stairs = []
        for n in sorted(set(rows)):
            progress(f"{n} rows, {context} positions")
            policies = (Plain(), *(Fixed(w - 1) for w in widths))
            generators = [Generator(target, drafter, policy=p, block_size=g, max_length=context) for p in policies]
            batch = Batch(generators[0], rows=n, slots=context)
            batch.admit(dict.fromkeys(range(n), Request([0], max_tokens=context, ignore_eos=True, seed=0)))
            fresh = batch.state
            timings = [[_seconds(batch, fresh, each) for each in generators] for _ in range(warm_up + repeats)][
                warm_up:
            ]
            plain, *drafted = (statistics.median(times) for times in zip(*timings, strict=True))
            draft = max(drafted[0] - plain, 0.0)
            if not draft:
                log.warning(
                    "Drafting for %d rows took no time: the machine was busy. Measure again when it is idle.", n
                )
            verify = (plain, *(max(d - draft, plain) for d in drafted[1:]))
            stairs.append(Stairs(n, tuple(n * w for w in widths), verify, draft))
        table.append((context, StepCosts(tuple(stairs))))
    return CostTable(tuple(table), environment(target, drafter, g))


def environment(target: Decoder, drafter: Any, block_size: int | None = None) -> dict[str, str]:
    """What step costs depend on: the device, the libraries, and the shapes and types of the models."""
    device = jax.devices()[0]
    kind = f"{device.device_kind} x{jax.device_count()}"
    if device.platform == "cpu":
        kind += f", {os.cpu_count()} cores"
    return {
        "device": kind,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "target": _name(target.config),
        "drafter": _name(drafter.config),
        "dtype": f"{target.dtype}, drafter {drafter.dtype}",
        "sharding": str(getattr(target.embedding[...].sharding, "spec", "one device")),
        "block size": str(drafter.config.block_size if block_size is None else block_size),
    }


def _name(config: Any) -> str:
    digest = hashlib.sha256(repr(config).encode()).hexdigest()[:12]
    return f"{config.num_layers} layers, width {config.hidden_size}, {digest}"


def _seconds(batch: Batch, fresh: State, generator: Generator) -> float:
    """Seconds of a round of a generator, from a state that all share: none of their policies keeps a memory."""
    batch.generator, batch.state = generator, jax.block_until_ready(jax.tree.map(jnp.copy, fresh))
    start = time.perf_counter()
    batch.step(ROUNDS)
    return (time.perf_counter() - start) / ROUNDS
