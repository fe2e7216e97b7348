"""Starts the tasks of requests, one in each turn of the event loop, callers by turns.

Sixty-four requests that arrive together would each hold up the loop, and one another, at every step on their way to the
engine: nobody's tokens are written meanwhile, and a request of another caller comes last.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

Start = Callable[[], None]


class RequestTurns:
    """The requests that wait to be started: as many as arrived in one turn of the loop, less one. One per server, used
    on its event loop only."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Start]] = OrderedDict()  # by caller, the next one first
        self._has_started = False  # one in this turn of the loop

    def start(self, caller: Callable[[], str], start: Start) -> None:
        """Calls `start` now, if none was started in this turn of the loop, or else in a later one, when it is the turn
        of the caller, who is asked for only then."""
        if self._has_started:
            self._waiting.setdefault(caller(), deque()).append(start)
            return
        self._has_started = True
        asyncio.get_running_loop().call_soon(self._start_next)
        start()

    def _start_next(self) -> None:
        if not self._waiting:
            self._has_started = False
            return
        asyncio.get_running_loop().call_soon(self._start_next)
        caller, starts = self._waiting.popitem(last=False)
        start = starts.popleft()
        if starts:
            self._waiting[caller] = starts  # behind all others
        start()
