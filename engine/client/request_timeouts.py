"""The two timeouts of a request: to be scheduled, from its admission on, and to be complete, from its arrival on.

They run on the server's side, so that they hold even while the engine process hangs or restarts.
"""

import asyncio
from collections.abc import Callable

from engine.core.generation_request import GenerationRequest


class RequestTimeouts:
    """The timers of one admitted request."""

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
        """Cancel the queue timeout: the request was scheduled in time. Idempotent."""
        if self._queue is not None:
            self._queue.cancel()

    def on_unscheduled(self) -> None:
        """Restart the queue timeout: the engine process that had scheduled the request has died, so it waits again."""
        if self._queue is not None and self._queue.cancelled():
            self._queue = asyncio.get_running_loop().call_later(self._max_queue_s, self._on_late_start)

    def cancel(self) -> None:
        """Cancels both timeouts for good, and forgets what they call: the request, which holds these timers."""
        self.on_scheduled()
        if self._deadline is not None:
            self._deadline.cancel()
        self._queue = self._deadline = None
        self._on_late_start = _do_nothing


def _do_nothing() -> None:
    pass
