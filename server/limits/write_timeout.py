"""The write timeout, which finds clients that stop reading their stream. There is one timer for a whole stream: one per
event would cost more than making the event."""

import asyncio
import time
from collections.abc import Callable


class WriteTimeout:
    """Calls `on_stall` once, when a write has not completed for `limit_s`. Its timer is on the running event loop,
    until `stop`."""

    def __init__(self, limit_s: float, on_stall: Callable[[], object]) -> None:
        self._limit_s = limit_s
        self._on_stall = on_stall
        self._num_sending = 0  # two, when an event waits for the client and a keep-alive comment behind it
        self._since_s = 0.0  # when the oldest write under way began
        self.has_stalled = False
        self._check_in(limit_s)

    def begin(self) -> None:
        """Notes that a write begins."""
        if not self._num_sending:
            self._since_s = time.monotonic()
        self._num_sending += 1

    def end(self) -> None:
        """Notes that a write has completed, or failed."""
        self._num_sending -= 1

    def stop(self) -> None:
        self._timer.cancel()

    def _check_in(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._check)

    def _check(self) -> None:
        left_s = self._limit_s
        if self._num_sending:
            left_s -= time.monotonic() - self._since_s
        if left_s > 0:
            self._check_in(left_s)
        else:
            self.has_stalled = True
            self._on_stall()
