"""How live requests stand: what the server knows of each, and what the engine process tells when it is asked.

Nobody asks in each step: a question costs a message and its answer, between two steps. There is one at a time, and
those who come meanwhile share the next one. So however many ask, the engine answers once a step at most.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence

from engine.client.live_request import LiveRequest
from engine.core.messages import InspectRequests, RequestState
from engine.core.request_snapshot import RequestSnapshot
from engine.process.supervisor import Supervisor

ANSWER_S = 2.0
"""How long an answer is waited for. A step may take longer, and an engine that hangs says nothing."""

States = Mapping[str, RequestState]
"""By the engine's ids; without those that the engine does not know."""


class RequestInspector:
    """All methods are for the event loop's thread."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._asked: asyncio.Future[States] | None = None  # answers the question that is under way
        self._next: asyncio.Future[States] | None = None  # and the one after it
        self._wanted: set[str] = set()  # by the one after it

    async def views(self, requests: Sequence[LiveRequest]) -> list[RequestSnapshot]:
        """Of each. One that ends while the engine is asked is told as if it waited."""
        try:
            async with asyncio.timeout(ANSWER_S):
                states = await self._ask([live.engine_id for live in requests])
        except TimeoutError:
            return [_view(live, None) for live in requests]
        return [_view(live, states.get(live.engine_id) or RequestState(live.engine_id)) for live in requests]

    def on_answer(self, states: Iterable[RequestState]) -> None:
        self._end_question({state.request_id: state for state in states})
        if self._next is not None:
            self._send_question()

    def engine_is_down(self) -> None:
        """It knows nobody any more, and answers no question."""
        self._end_question({})
        self._asked, self._next = self._next, None
        self._end_question({})
        self._wanted.clear()

    async def _ask(self, engine_ids: Sequence[str]) -> States:
        if not engine_ids or not self._supervisor.is_up:
            return {}
        self._wanted.update(engine_ids)
        self._next = answer = self._next or asyncio.get_running_loop().create_future()
        if self._asked is None:
            self._send_question()
        return await asyncio.shield(answer)

    def _send_question(self) -> None:
        self._asked, self._next = self._next, None
        wanted, self._wanted = self._wanted, set()
        self._supervisor.send(InspectRequests(sorted(wanted)))

    def _end_question(self, states: States) -> None:
        if self._asked is not None:
            self._asked.set_result(states)
            self._asked = None


def _view(live: LiveRequest, state: RequestState | None) -> RequestSnapshot:
    request = live.request
    return RequestSnapshot(
        group_id=request.group_id,
        arrival_s=request.arrival_s,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=live.num_received,
        ttft_s=None if live.first_token_s is None else live.first_token_s - request.arrival_s,
        left_s=_left_s(live),
        state=state,
    )


def _left_s(live: LiveRequest) -> float | None:
    """At the pace since its first token."""
    if live.first_token_s is None or live.last_token_s <= live.first_token_s:
        return None
    pace_s = (live.last_token_s - live.first_token_s) / (live.num_received - 1)
    num_left = live.request.params.max_tokens - live.num_received
    return max(0.0, live.last_token_s + num_left * pace_s - time.monotonic())
