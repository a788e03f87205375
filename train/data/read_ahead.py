"""Batches made ahead of the device, by Grain."""

from collections.abc import Callable
from typing import Generic, TypeVar

import grain

Batch = TypeVar("Batch")


class _Steps(Generic[Batch]):
    """What Grain takes as a source: a length, and an element by its number."""

    def __init__(self, make: Callable[[int], Batch], until: int):
        self.make, self.until = make, until

    def __len__(self) -> int:
        return self.until

    def __getitem__(self, index: int) -> Batch:
        return self.make(int(index))


def read_ahead(
    make: Callable[[int], Batch], first: int, until: int, *, ahead: int = 2, threads: int = 1
) -> grain.DatasetIterator[Batch]:
    """make(first), ..., make(until - 1), `ahead` of them made by `threads` threads before they are asked for.

    Its state is the next step, `{"next_index": step}`: whoever knows the step needs no other to go on from. Close it
    when it is not read to its end.
    """
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
    batches = iter(grain.MapDataset.source(_Steps(make, until)).to_iter_dataset(options))
    batches.set_state({"next_index": first})
    return batches
