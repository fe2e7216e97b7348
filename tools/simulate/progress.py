"""How far a simulation is, said while it runs."""

import sys
import time
from collections.abc import Callable

PAUSE_S = 10.0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Progress:
    """Says every ten seconds of the clock which part of all requests has ended."""

    def __init__(
        self,
        title: str,
        num_requests: int,
        say: Callable[[str], None] = _say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._num_requests = num_requests
        self._say = say
        self._clock = clock
        self._began_s = self._said_s = clock()

    def __call__(self, num_ended: int) -> None:
        """Takes how many requests have ended so far."""
        now_s = self._clock()
        if now_s - self._said_s < PAUSE_S:
            return
        self._said_s = now_s
        part, seconds = num_ended / self._num_requests, now_s - self._began_s
        self._say(f"{self._title}: {part:.1%} of {self._num_requests:,} requests after {seconds:.0f} s")
