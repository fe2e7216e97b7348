"""uvicorn's HTTP/1.1 protocol with load shedding: an overloaded server refuses a request before it starts a task for
it."""

import logging
import math
from functools import partial
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from server.core.request_record import note_arrival
from server.http.early_refusal import EarlyRefusals
from server.http.raw_response import raw_answer
from server.http.upgrade_requests import UpgradeProtocol
from server.limits.request_turns import RequestTurns
from server.limits.retry_throttle import RetryThrottle

logger = logging.getLogger("twostep.server")


class EarlyProtocol(UpgradeProtocol):
    """A connection whose requests pass the retry throttle, the early refusals and the turns of requests."""

    def __init__(
        self,
        *args: Any,
        early: EarlyRefusals,
        retry_throttle: RetryThrottle,
        request_turns: RequestTurns,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._early = early
        self._retry_throttle = retry_throttle
        self._request_turns = request_turns
        self._refused_at_s = -math.inf

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.cycle.response_complete and not self.cycle.keep_alive:
            self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        wait_s = self._retry_throttle.wait_s(self._refused_at_s, self.loop.time())
        if wait_s > 0:
            note_arrival(cast(Scope, cycle.scope))
            self.loop.call_later(wait_s, self._answer, cycle, app)
        else:
            self._answer(cycle, app)

    def _answer(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.disconnected or self.transport.is_closing():
            return
        # A client that does not read its responses is answered by a task, which waits for it.
        refusal = None if self.flow.write_paused else self._refusal_of(cycle)
        if refusal is None:
            note_arrival(cast(Scope, cycle.scope))
            self._request_turns.start(
                partial(self._early.caller_of, cast(Scope, cycle.scope)), partial(self._begin, cycle, app)
            )
            return
        self._refused_at_s = self.loop.time()
        self.transport.write(refusal)
        cycle.response_started = cycle.response_complete = True
        cycle.on_response = _nothing  # breaks a reference cycle, as uvicorn does
        if not (cycle.keep_alive or cycle.more_body):  # else it is closed when the body has been read
            self.transport.close()
        self.on_response_complete()

    def _begin(self, cycle: RequestResponseCycle, app: Any) -> None:
        if not (cycle.disconnected or self.transport.is_closing()):
            super()._start_asgi_task(cycle, app)

    def _refusal_of(self, cycle: RequestResponseCycle) -> bytes | None:
        """Returns the refusal to write, or None. Raises nothing: called by the parser, an error would become a 400, and
        called by a timer it would be lost."""
        try:
            response = self._early.answer_to(cast(Scope, cycle.scope))
            if response is None:
                return None
            return raw_answer(response, self.server_state.default_headers, cycle.keep_alive)
        except Exception:
            logger.exception("a request could not be looked at early; a task looks at it")
            return None


def _nothing() -> None:
    pass
