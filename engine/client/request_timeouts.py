"""The two limits of a request's patience: to be scheduled, from now on, and to be complete, from its arrival on.

Kept on the server's side, so that they hold even while the engine process hangs or starts again.
"""

import asyncio
from collections.abc import Callable

from engine.client.interface import GenerationRequest


class RequestTimeouts:
    """The timers of one request that was admitted."""

    def __init__(
        self,
        request: GenerationRequest,
        max_queue_s: float,
        on_late_start: Callable[[], None],
        on_deadline: Callable[[], None],
    ) -> None:
        self._max_queue_s = max_queue_s
        self._on_late_start = on_late_start
        call_later = asyncio.get_running_loop().call_later
        self._queue = None if request.is_sibling else call_later(max_queue_s, on_late_start)
        self._deadline = None if request.left_s is None else call_later(request.left_s, on_deadline)

    def on_scheduled(self) -> None:
        """The queue's limit was kept. Idempotent."""
        if self._queue is not None:
            self._queue.cancel()

    def on_unscheduled(self) -> None:
        """It waits again: the engine process that had scheduled it has died."""
        if self._queue is not None and self._queue.cancelled():
            self._queue = asyncio.get_running_loop().call_later(self._max_queue_s, self._on_late_start)

    def cancel(self) -> None:
        self.on_scheduled()
        if self._deadline is not None:
            self._deadline.cancel()
