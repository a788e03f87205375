"""Which requests take part in a step: admission, pages, parts of prompts, preemption. Plain Python on the host."""

import dataclasses
from collections import deque
from typing import Any

import numpy as np

from serve.engine.pages import PagePool
from serve.engine.request import ServeRequest, Usage


class OutOfPages(Exception):
    """A running request cannot grow; another has to give its pages back first."""


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request on its way.

    Attributes:
      tokens: prompt and output, as far as steps were read; limit: length at which it ends.
      sink: told of outputs; seed: of its draws.
      slot, pages: while it runs; computed: positions of the prompt, or of all tokens after a preemption, that were
        dispatched; decoding: all of them were.
      ahead: steps dispatched and not read, in which it decodes.
    """

    request: ServeRequest
    limit: int
    sink: Any
    seed: int
    tokens: list[int] = dataclasses.field(init=False)
    usage: Usage = dataclasses.field(init=False)
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    decoding: bool = False
    ahead: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(map(int, self.request.prompt))
        self.usage = Usage(len(self.tokens))

    @property
    def resumed(self) -> bool:
        """Whether it has drawn tokens, and came back from a preemption if it is not decoding."""
        return len(self.tokens) > len(self.request.prompt)

    @property
    def known(self) -> int:
        """Tokens there are at least, once all steps are read."""
        return len(self.tokens) + self.ahead


@dataclasses.dataclass(frozen=True)
class Step:
    """One step as the host sees it.

    Attributes:
      draftable: sequences that decode and whose context is complete; starting: those that end their prompt in this step
        and draw their first token; order: [s] slots, of these first, then of those that only prefill, then the rest.
      prefill: [s] tokens of prompts; page_indices: [s, pages].
    """

    draftable: list[Sequence]
    starting: list[Sequence]
    order: np.ndarray
    prefill: np.ndarray
    page_indices: np.ndarray

    @property
    def decoding(self) -> list[Sequence]:
        return self.draftable + self.starting


class Scheduler:
    """Waiting and running requests. First come, first served; the last that came is the first to be preempted."""

    def __init__(self, pool: PagePool, slots: int, columns: int, chunk: int, reach: int):
        """Args:
        columns: pages of a request at most; chunk: tokens of prompts a step; reach: positions a step may write from the
          anchor on.
        """
        self.pool, self.chunk, self.reach = pool, chunk, reach
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # by admission
        self.preemptions = 0
        self._free = list(range(slots))[::-1]
        self.table = np.zeros((slots, columns), np.int32)

    def admit(self) -> list[Sequence]:
        """Gives slots and pages to waiting requests, as far as they reach; returns those that got some."""
        admitted = []
        while self.waiting and self._free:
            sequence = self.waiting[0]
            count = self._pages_for(len(sequence.tokens) + self.reach)
            # Left for the running ones to grow by, lest a new request preempts another at once.
            reserve = len(self.running)
            if self.running and self.pool.free + self.pool.cached < count + reserve:
                break
            found = self.pool.admit(sequence.tokens, count)
            if found is None:
                break
            self.waiting.popleft()
            sequence.pages, sequence.computed = found
            if not sequence.resumed:  # what was told of it stays
                sequence.usage = dataclasses.replace(sequence.usage, cached_tokens=sequence.computed)
            sequence.slot = self._free.pop()
            self._write(sequence)
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def step(self) -> Step | None:
        """The next step, or None while nothing can run. Its parts of prompts count as dispatched.

        Raises:
          OutOfPages: a running request cannot grow: read all steps, `preempt`, and ask again.
        """
        for sequence in self.running:
            # Its next round is drafted, as it would have been: so that it draws what it would have drawn.
            sequence.decoding |= sequence.resumed and sequence.computed == len(sequence.tokens) - 1
        draftable = [s for s in self.running if s.decoding and s.known < s.limit]
        for sequence in draftable:
            self._grow(sequence)
        prefill, left = np.zeros(len(self.table), np.int32), self.chunk
        starting, parts = [], []
        for sequence in self.running:
            if sequence.decoding:
                continue
            rest = len(sequence.tokens) - 1 - sequence.computed
            part = min(rest, left)
            if part < rest and not part:
                break
            left -= part
            prefill[sequence.slot] = part
            sequence.computed += part
            # Steps are run in order, so whoever finds these pages reads them when they are written.
            self.pool.share(sequence.tokens[: sequence.computed], sequence.pages)
            if part == rest and not sequence.resumed:
                sequence.decoding = True
                starting.append(sequence)
            else:
                parts.append(sequence)
        if not (draftable or starting or parts):
            return None
        first = [s.slot for s in (*draftable, *starting, *parts)]
        rest = sorted(set(range(len(self.table))) - set(first))
        order = np.array(first + rest, np.int32)
        for sequence in draftable + starting:
            sequence.ahead += 1
        return Step(draftable, starting, order, prefill, self.table.copy())

    def preempt(self) -> Sequence:
        """Takes slot and pages from the request that came last; it waits first in line. No step may be unread."""
        sequence = self.running[-1]
        self.leave(sequence)
        sequence.decoding = False
        self.waiting.appendleft(sequence)
        self.preemptions += 1
        return sequence

    def leave(self, sequence: Sequence) -> None:
        """Frees what a request holds; what it computed stays findable. Steps with it may still be unread."""
        if sequence not in self.running:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        computed = len(sequence.tokens) - 1 if sequence.decoding else sequence.computed
        self.pool.share(sequence.tokens[:computed], sequence.pages)
        self.pool.release(sequence.pages)
        sequence.pages = []
        self.table[sequence.slot] = 0
        self._free.append(sequence.slot)
        self.running.remove(sequence)

    def _grow(self, sequence: Sequence) -> None:
        """Pages for all that steps not read yet, and one more, may write."""
        needed = self._pages_for(len(sequence.tokens) + (sequence.ahead + 1) * self.reach)
        if (missing := needed - len(sequence.pages)) > 0:
            more = self.pool.allocate(missing)
            if more is None:
                raise OutOfPages
            sequence.pages += more
            self._write(sequence)

    def _pages_for(self, positions: int) -> int:
        return min(-(-positions // self.pool.page_size), self.table.shape[1])

    def _write(self, sequence: Sequence) -> None:
        self.table[sequence.slot, : len(sequence.pages)] = sequence.pages
