"""Snapshots of live requests, what the server knows of each and what the engine process reports when it is queried; and
what it reports of the prefix cache.

A query costs a message and its answer, between two steps. One is in flight at a time, and callers that come meanwhile
share the next one. So however many callers there are, the engine answers at most once per step.
"""

import asyncio
import time
from collections.abc import Sequence

from engine.client.live_request import LiveRequest
from engine.core.cache_steering import CachedPrefixes
from engine.core.errors import EngineUnavailableError
from engine.core.messages import Inspect, Inspection, RequestState
from engine.core.request_snapshot import RequestSnapshot
from engine.process.supervisor import Supervisor

ANSWER_TIMEOUT_S = 2.0
"""How long to wait for an answer. A step may take longer, and an engine that hangs sends nothing."""

_NOTHING = Inspection([])


class RequestInspector:
    """Queries the engine process. All methods are for the event loop's thread."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._in_flight: asyncio.Future[Inspection] | None = None  # the answer to the query that was sent
        self._next: asyncio.Future[Inspection] | None = None  # the answer to the query after that
        self._next_ids: set[str] = set()  # the engine ids of the query after that
        self._next_tenants: set[str] = set()

    async def snapshots(self, requests: Sequence[LiveRequest]) -> list[RequestSnapshot]:
        """Returns a snapshot of each request. One that ends during the query has the state of one that waits."""
        try:
            answer = await self._query([live.engine_id for live in requests], []) if requests else _NOTHING
        except TimeoutError:
            return [_snapshot(live, None) for live in requests]
        states = {state.request_id: state for state in answer.states}
        return [_snapshot(live, states.get(live.engine_id) or RequestState(live.engine_id)) for live in requests]

    async def cached_prefixes(self, tenant: str) -> list[CachedPrefixes]:
        """Returns what is cached of the tenant's ended requests, by key. Raises EngineUnavailableError if the engine
        does not answer."""
        try:
            return (await self._query([], [tenant])).cached.get(tenant, [])
        except TimeoutError:
            raise EngineUnavailableError("The engine does not answer: its steps take long. Try again later.") from None

    def on_answer(self, answer: Inspection) -> None:
        self._end_query(answer)
        if self._next is not None:
            self._send_query()

    def engine_is_down(self) -> None:
        """Answer all queries: an engine that is down knows no request and sends no answer."""
        self._end_query(_NOTHING)
        self._in_flight, self._next = self._next, None
        self._end_query(_NOTHING)
        self._next_ids.clear()
        self._next_tenants.clear()

    async def _query(self, engine_ids: Sequence[str], tenants: Sequence[str]) -> Inspection:
        """Returns the answer to the next query, which asks for these, too. Raises TimeoutError."""
        if not self._supervisor.is_up:
            return _NOTHING
        self._next_ids.update(engine_ids)
        self._next_tenants.update(tenants)
        self._next = answer = self._next or asyncio.get_running_loop().create_future()
        if self._in_flight is None:
            self._send_query()
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await asyncio.shield(answer)

    def _send_query(self) -> None:
        self._in_flight, self._next = self._next, None
        ids, self._next_ids = self._next_ids, set()
        tenants, self._next_tenants = self._next_tenants, set()
        self._supervisor.send(Inspect(sorted(ids), sorted(tenants)))

    def _end_query(self, answer: Inspection) -> None:
        if self._in_flight is not None:
            self._in_flight.set_result(answer)
            self._in_flight = None


def _snapshot(live: LiveRequest, state: RequestState | None) -> RequestSnapshot:
    request = live.request
    return RequestSnapshot(
        client_request_id=request.client_request_id,
        arrival_s=request.arrival_s,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=live.num_received,
        queue_s=live.queue_s,
        ttft_s=None if live.first_token_s is None else live.first_token_s - request.arrival_s,
        left_s=_left_s(live),
        state=state,
    )


def _left_s(live: LiveRequest) -> float | None:
    """Returns the seconds until the request has `max_tokens` at its pace so far; None before its second token."""
    if live.first_token_s is None or live.last_token_s <= live.first_token_s:
        return None
    pace_s = (live.last_token_s - live.first_token_s) / (live.num_received - 1)
    num_left = live.request.params.max_tokens - live.num_received
    return max(0.0, live.last_token_s + num_left * pace_s - time.monotonic())
