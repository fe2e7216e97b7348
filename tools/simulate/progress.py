"""How far a simulation is, said while it runs."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator

from tools.simulate.trace import Session

PAUSE_S = 10.0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def telling(
    sessions: Iterable[Session],
    title: str,
    num_requests: int,
    say: Callable[[str], None] = _say,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Session]:
    """Yields the sessions as they are asked for, and says every ten seconds of the clock which part of all requests
    belongs to sessions that have begun."""
    began_s = said_s = clock()
    num_begun = 0
    for session in sessions:
        now_s = clock()
        if now_s - said_s >= PAUSE_S:
            said_s = now_s
            say(f"{title}: {num_begun / num_requests:.1%} of {num_requests:,} requests after {now_s - began_s:.0f} s")
        num_begun += len(session.turns)
        yield session
