"""Stopping in time when the machine is about to be taken away."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
from jax.experimental import multihost_utils


@contextmanager
def preemption() -> Iterator[Callable[[int], bool]]:
    """Yields what tells, after each update and given its number, whether SIGTERM asks to stop here.

    With several processes one of which is told, all stop after the same update: each must ask after every one.
    """
    if jax.process_count() > 1:  # jax.distributed listens to the signal
        yield multihost_utils.reached_preemption_sync_point
        return
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        yield lambda step: told.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)
