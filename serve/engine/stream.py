"""Outputs of one request, from the engine's thread to the event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable

from serve.engine.request import Output


class EngineStream:
    """See `serve.engine.request.Stream`."""

    def __init__(self, cancel: Callable[[], None]):
        """On the event loop's thread; `cancel` ends the request."""
        self._loop, self._cancel = asyncio.get_running_loop(), cancel
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()
        self._ended = False

    def put(self, output: Output) -> None:
        """From the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)
        except RuntimeError:  # the event loop is closed, and whoever listened is gone
            if output.finish_reason is None:
                self._cancel()

    async def __aiter__(self) -> AsyncIterator[Output]:
        while not self._ended:
            output = await self._outputs.get()
            self._ended = output.finish_reason is not None
            yield output

    def cancel(self) -> None:
        if not self._ended:
            self._cancel()
