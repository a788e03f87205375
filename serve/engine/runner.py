"""The device's side of the engine: it alone knows tensors."""

import dataclasses
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax.calibration.survival import Scaling
from dspark_jax.decoding.generate import check_pair
from dspark_jax.decoding.state import Finish
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.drafters.kinds import AnyDrafter
from dspark_jax.models.config import TargetConfig
from dspark_jax.models.decoder import Decoder
from dspark_jax.scheduling import Stairs, StepCosts
from serve.engine.attention import PAGES
from serve.engine.config import DEFAULT_LENGTH, EngineConfig, ladder
from serve.engine.request import ServeRequest
from serve.engine.scheduler import Sequence, Step
from serve.engine.state import Slots
from serve.engine.step import Orders, Plan, Results, draft, enter, run
from serve.engine.terms import terms_of

MEASURED_AT = 192
"""Positions of context at which steps are measured."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the policy wants of a step.

    Attributes:
      running: [s] slots that may be drafted for; drafted: whether they are; admitted: drafts to verify in all.
      most: drafts of one slot; floor: of every slot first; threshold: survival below which none is verified.
    """

    running: np.ndarray
    drafted: bool
    admitted: int
    most: int
    floor: int
    threshold: float


@dataclasses.dataclass(frozen=True)
class Launch:
    """A step on its way.

    Attributes:
      results: on the device; rows, extra: size of the program that runs it.
    """

    results: Results
    rows: int
    extra: int


class Runner:
    """Models, slots and programs.

    Every step is one of few compiled programs: a block is drafted for 1, 2, 4 .. slots, and a stream is run with so
    many rows, with or without parts of prompts. None is compiled behind `warm_up`.

    Attributes:
      sizes: of what is compiled, as text: what costs hold for, besides the models.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: AnyDrafter | None,
        config: EngineConfig,
        scaling: Scaling | None = None,
        mesh: Mesh | None = None,
    ):
        """Raises:
        ValueError: drafter and target do not fit, the drafter is of a kind whose context is not kept in pages, or a
          size is out of range.
        """
        c, trained = target.config, 0
        if drafter is not None:
            if not isinstance(drafter, DSpark):
                raise ValueError(
                    f"a {type(drafter).__name__} drafter cannot be served: its context is not kept in pages. Use a "
                    "DSpark or DFlash drafter, or none."
                )
            check_pair(target, drafter)
            trained = drafter.config.block_size
        g = trained if config.block_size is None else config.block_size
        if not 0 <= g <= trained:
            raise ValueError(f"block_size must be within 0..{trained}, what the drafter was trained for; got {g}.")
        self.max_length = config.max_length or min(c.max_positions, DEFAULT_LENGTH)
        if not 1 < self.max_length <= c.max_positions:
            raise ValueError(f"max_length must be within 2..{c.max_positions}, got {self.max_length}.")
        if mesh is not None and c.num_kv_heads % (shards := mesh.shape["tensor"]):
            raise ValueError(f"{c.num_kv_heads} key/value heads do not divide over {shards} devices of `tensor`.")
        drafter = drafter if g else None
        self.config, self.block_size, self._target_config, self._mesh = config, g, c, mesh
        graph, params = nnx.split(target)
        draft_graph, draft_params = nnx.split(drafter) if drafter else (None, None)
        self._plan = Plan(graph, draft_graph, g, config.page_size, scaling.first(g) if scaling and g else None)
        self._params = params, draft_params, drafter and drafter.draft_head(target)
        self.reach = reach_of(drafter.config if drafter else None)
        longest = columns_for(self.max_length, self.reach, config.page_size)
        # The first page is nobody's: padding is written there.
        self.pages = config.pages or 1 + config.slots * longest
        self.columns = min(longest, self.pages - 1)
        self.max_length = min(self.max_length, self.columns * config.page_size - 2 * self.reach)
        if self.max_length < 2:
            raise ValueError(f"{self.pages} pages of {config.page_size} positions hold no request; give more pages.")
        most = config.slots * (1 + g)
        if config.rows and config.rows[-1] < most:
            raise ValueError(f"rows must reach {most}, a block and its anchor for every slot; got {config.rows}.")
        self._mixed = list(config.rows[-1:]) or ladder(most, step=4)
        self._drafting = [config.slots] if config.rows else ladder(config.slots)
        self._rows = rows_by_requests(list(config.rows) or ladder(most, halves=True), self._drafting, g)
        self.sizes = f"draft {self._drafting}, run {self._rows}, pages of {config.page_size}"
        self._slots = self._empty(target, drafter)

    @property
    def drafts(self) -> bool:
        """Whether there is anything to draft with."""
        return self._plan.drafter is not None

    @property
    def programs(self) -> int:
        """Programs compiled so far, of all engines of this process."""
        return sum(program._cache_size() for program in (enter, draft, run))  # pyright: ignore[reportAttributeAccessIssue]

    def enter(self, sequence: Sequence) -> None:
        """Puts a sequence into its slot."""
        terms = terms_of(sequence.request, self._target_config, sequence.limit, sequence.seed)
        self._enter(sequence.slot, terms, sequence.tokens, len(sequence.tokens), sequence.computed)

    def launch(self, step: Step, choice: Choice) -> Launch:
        """Dispatches a step; nothing waits for it."""
        decoding = len(step.decoding)
        extra = self.config.chunk if step.prefill.any() else 0
        wanted = decoding + choice.admitted * choice.drafted
        sizes = self._mixed if extra else self._rows[next(n for n in self._drafting if n >= decoding)]
        rows = next((n for n in sizes if n >= wanted), sizes[-1])
        if choice.drafted:
            self._draft(step.order, step.page_indices, next(n for n in self._drafting if n >= len(step.draftable)))
        decode = np.zeros(self.config.slots, bool)
        decode[[sequence.slot for sequence in step.decoding]] = True
        orders = Orders(
            order=step.order,
            prefill=step.prefill,
            decode=decode,
            drafted=choice.running & choice.drafted,
            page_indices=step.page_indices,
            budget=np.int32(rows - decoding),
            most=np.int32(choice.most),
            floor=np.int32(choice.floor),
            threshold=np.float32(choice.threshold),
        )
        results = self._run(orders, rows, extra)
        for leaf in jax.tree.leaves(results):
            leaf.copy_to_host_async()
        return Launch(results, rows, extra)

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None, repeats: int = 3) -> StepCosts:
        """Compiles every program and measures it: what steps cost here, at contexts of up to `MEASURED_AT` positions.

        Args:
          progress: told how many of how many programs are done.
          repeats: timed runs of each, of which the median counts.
        """
        s, g = self.config.slots, self.block_size
        slots, table = np.arange(s, dtype=np.int32), np.zeros((s, self.columns), np.int32)
        middle = max(min(MEASURED_AT, self.max_length - (repeats + 2) * (g + 1)), 1)
        everything = terms_of(ServeRequest([0]), self._target_config, self.max_length, 0)

        def measured(requests: int, rows: int, extra: int) -> Callable[[], Results]:
            decode = slots < min(requests, rows)
            limits = np.int32(rows), np.int32(g), np.int32(0), np.float32(0)
            orders = Orders(slots, np.zeros_like(slots), decode, decode, table, *limits)
            return lambda: self._run(orders, rows, extra)

        drafting = {("draft", n): lambda n=n: self._draft(slots, table, n) for n in self._drafting if self.drafts}
        running = {(n, rows): measured(n, rows, 0) for n, sizes in self._rows.items() for rows in sizes}
        running |= {("mixed", rows): measured(s, rows, self.config.chunk) for rows in self._mixed}
        seconds: dict[Any, float] = {}
        for done, (key, one) in enumerate((drafting | running).items(), 1):
            for slot in range(s):  # every slot in the middle of a request, in nobody's page
                self._enter(slot, everything, [], middle, middle - 1)
            times = []
            for _ in range(repeats + 1):
                start = time.perf_counter()
                jax.block_until_ready((one(), self._slots))
                times.append(time.perf_counter() - start)
            seconds[key] = float(np.median(times[1:]))
            progress(done, len(drafting | running))
        self._slots = self._slots.replace(finish=jnp.full_like(self._slots.finish, Finish.EMPTY))
        stairs = tuple(
            Stairs(n, tuple(sizes), tuple(seconds[n, rows] for rows in sizes), seconds.get(("draft", n), 0.0))
            for n, sizes in self._rows.items()
        )
        self._rows = {each.requests: each.useful for each in stairs}
        self._mixed = Stairs(s, tuple(self._mixed), tuple(seconds["mixed", rows] for rows in self._mixed)).useful
        return StepCosts(stairs)

    def _enter(self, slot: int, terms: Any, tokens: list[int], length: int, computed: int) -> None:
        row = np.zeros(self.max_length, np.int32)
        row[: len(tokens)] = tokens
        with self._on_mesh():
            self._slots = enter(self._slots, np.int32(slot), terms, row, np.int32(length), np.int32(computed))

    def _draft(self, order: np.ndarray, page_indices: np.ndarray, rows: int) -> None:
        with self._on_mesh():
            self._slots = draft(self._plan, self._params, self._slots, order, page_indices, rows)

    def _run(self, orders: Orders, rows: int, extra: int) -> Results:
        with self._on_mesh():
            self._slots, results = run(self._plan, self._params, self._slots, orders, rows, extra)
        return results

    def _on_mesh(self) -> Any:
        return jax.set_mesh(self._mesh) if self._mesh else nullcontext()

    def _empty(self, target: Decoder, drafter: DSpark | None) -> Slots:
        rows = drafter.config.draft_rows if drafter else 1
        s, g = self.config.slots, max(self.block_size, 1)
        slots = empty_slots(s, g, rows, self.max_length, self._target_config)
        if self._mesh is not None:
            slots = jax.device_put(slots, NamedSharding(self._mesh, P()))

        def pages(model: Decoder | DSpark) -> tuple[jax.Array, ...]:
            lie = self._mesh and NamedSharding(self._mesh, PAGES)
            shape = page_shape(model.config, self.pages, self.config.page_size)
            return tuple(jnp.zeros(shape, model.dtype, device=lie) for _ in range(model.config.num_layers))

        return slots.replace(pages=pages(target), draft_pages=pages(drafter) if drafter else ())


def rows_by_requests(sizes: list[int], requests: list[int], block_size: int) -> dict[int, list[int]]:
    """Which of the programs' `sizes` steps of up to so many requests run in, by the next of these numbers `requests`:
    those that are too large for the number before it, up to one that holds an anchor and a block of each."""
    found = {}
    for below, n in zip([0, *requests], requests, strict=False):
        most = next(size for size in sizes if size >= n * (1 + block_size))
        found[n] = [size for size in sizes if below < size <= most]
    return found


def reach_of(drafter: DrafterConfig | None) -> int:
    """Positions that a step may write from the anchor on: the anchor, and a block that is drafted there."""
    return 1 + (drafter.block_size + drafter.first_slot if drafter else 0)


def columns_for(max_length: int, reach: int, page_size: int) -> int:
    """Pages of a request of `max_length` positions, with what a step and the one before it may write behind them."""
    return -(-(max_length + 2 * reach) // page_size)


def page_shape(config: Any, pages: int, page_size: int) -> tuple[int, ...]:
    """Of a layer's pages: keys at even and values at odd places, see `PagedCache`."""
    return pages, page_size, 2 * config.num_kv_heads, config.head_dim


def empty_slots(slots: int, block_size: int, draft_rows: int, max_length: int, config: TargetConfig) -> Slots:
    """Slots without a request and without pages."""
    s, g = slots, block_size
    terms = terms_of(ServeRequest([0]), config, max_length, 0)
    return Slots(
        terms=jax.tree.map(lambda x: jnp.stack([x] * s), terms),
        tokens=jnp.zeros((s, max_length), jnp.int32),
        length=jnp.ones(s, jnp.int32),
        computed=jnp.zeros(s, jnp.int32),
        finish=jnp.full(s, Finish.EMPTY, jnp.int8),
        drafts=jnp.zeros((s, g), jnp.int32),
        probs=jnp.zeros((s * g, draft_rows), jnp.float32),
        confidence=jnp.zeros((s, g), jnp.float32),
        pages=(),
        draft_pages=(),
    )
