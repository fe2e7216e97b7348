"""Telling the engine process of requests that ended here, and waiting until its numbers know of them."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from engine.core.messages import AbortRequests


class Aborts:
    """Aborts requests in the engine process. One that ends by a stop string, or whose client leaves, still counts as
    running there until the step under way ends."""

    def __init__(self, send: Callable[[AbortRequests], None]) -> None:
        self._send = send
        self._unsent: list[str] = []
        self._num_aborts = 0  # that the current process is told of
        self._settled = asyncio.Event()
        self._settled.set()

    def add(self, engine_id: str) -> None:
        """Aborts a request: one message is sent for all that end in this turn of the event loop."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_all)
        self._unsent.append(engine_id)
        self._num_aborts += 1
        self._settled.clear()

    def on_stats(self, num_aborts: int) -> None:
        """Takes the number of aborts that the newest statistics know of."""
        if num_aborts >= self._num_aborts:
            self._settled.set()

    def on_restart(self) -> None:
        """A new engine process knows of no abort, and of no request that there was one for."""
        self._num_aborts = 0
        self._settled.set()

    async def settle(self, timeout_s: float) -> None:
        """Returns when the statistics know of all aborts so far, or after `timeout_s`: a step may take longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()

    def _send_all(self) -> None:
        request_ids, self._unsent = self._unsent, []
        self._send(AbortRequests(request_ids))
