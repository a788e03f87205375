"""A server that drains: told to stop, it turns new requests away and ends when the running ones have."""

import logging
import time
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Serves an application of `create_app`.

    The first SIGTERM or SIGINT starts draining: /health fails and new requests get 503, so that a load balancer looks
    elsewhere. It ends when no request runs, after `drain_seconds`, or at the second signal.
    """

    def __init__(self, app: Starlette, *, drain_seconds: float = 60.0, **options: Any):
        """`options` are those of uvicorn's Config."""
        # Idle connections are kept for longer than clients keep them, so that none is closed as a request sets out.
        defaults = {"timeout_keep_alive": 75, "timeout_graceful_shutdown": 5, "access_log": False, "log_config": None}
        super().__init__(uvicorn.Config(app, **defaults | options))
        self.serving, self.drain_seconds = app.state.serving, drain_seconds
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._deadline is not None:
            return super().handle_exit(sig, frame)
        self.drain()

    def drain(self) -> None:
        """Begins to end."""
        log.info("draining: %d requests run", self.serving.active)
        self.serving.draining, self._deadline = True, time.monotonic() + self.drain_seconds

    async def on_tick(self, counter: int) -> bool:
        if self._deadline is not None and (not self.serving.active or time.monotonic() > self._deadline):
            self.should_exit = True
        return await super().on_tick(counter)
