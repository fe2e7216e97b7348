"""How long a request is sent to one replica after the other."""

import asyncio
import time
from collections.abc import Awaitable, Callable

MAX_MOVES = 5
"""How many replicas may be lost with a request without a token in between: it may be what they die of."""
_PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.0)  # behind the second attempt that failed, the third, ...; the last for all others


class ReplicaLostError(Exception):
    """The replica died, or gave the request up: another one can take it over."""


class NoReplicaError(ReplicaLostError):
    """No replica took the request: there is none, or the one that was asked is full or ends."""


class Moves:
    """The replicas that one request was lost with, and whether it is to be sent to another one.

    Replacements of those that died take a while to start. So it waits where none takes the request, a bounded time.
    """

    def __init__(
        self,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`wait_s` bounds the time without a replica that has the request."""
        self._wait_s = wait_s
        self._clock, self._sleep = clock, sleep
        self._until_s = clock() + wait_s
        self._num_lost = self._num_failed = 0  # since the last token
        self._replica = ""  # that has the request
        self.excluded: list[str] = []

    @property
    def left_s(self) -> float:
        """Seconds that are left to wait for a replica."""
        return self._until_s - self._clock()

    def take(self, replica: str) -> None:
        """Records who has the request now."""
        self._replica = replica

    def progress(self) -> None:
        """To be called for each token."""
        self._num_lost = self._num_failed = 0

    def fail(self, error: ReplicaLostError) -> None:
        """Records that an attempt ended so."""
        self._num_failed += 1
        if self._replica:
            self.excluded.append(self._replica)
        self._replica = ""
        if not isinstance(error, NoReplicaError):
            self._num_lost += 1
            self._until_s = self._clock() + self._wait_s

    async def may_try(self) -> bool:
        """Pauses if more than one attempt failed, and returns whether there is to be another."""
        if self._num_lost > MAX_MOVES:
            return False
        if self._num_failed > 1:
            await self._sleep(_PAUSES_S[min(self._num_failed - 1, len(_PAUSES_S)) - 1])
        return self.left_s > 0
