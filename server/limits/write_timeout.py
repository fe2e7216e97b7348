"""Notices a client that stops reading. One timer for a whole stream: one per event costs more than making the event."""

import asyncio
import time
from collections.abc import Callable


class WriteTimeout:
    """Calls `on_stall` once when something has been on its way for `limit_s`. On the running loop, until `stop`."""

    def __init__(self, limit_s: float, on_stall: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._on_stall = on_stall
        self._num_sending = 0  # more than one: an event waits for the client, and a keep-alive for it, too
        self._since_s = 0.0  # when the first of these began
        self.has_stalled = False
        self._look_in(limit_s)

    def begin(self) -> None:
        """Something is being sent."""
        if not self._num_sending:
            self._since_s = time.monotonic()
        self._num_sending += 1

    def end(self) -> None:
        """It has been sent, or failed."""
        self._num_sending -= 1

    def stop(self) -> None:
        self._timer.cancel()

    def _look_in(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        left_s = self._limit_s
        if self._num_sending:
            left_s -= time.monotonic() - self._since_s
        if left_s > 0:
            self._look_in(left_s)
        else:
            self.has_stalled = True
            self._on_stall()
