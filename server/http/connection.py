"""One client's connection: uvicorn's HTTP/1.1 protocol, with bounds that uvicorn does not have.

- head: --max-header-bytes, --header-timeout; bounds on the body are those of `middleware.body_limit`
- pipelining: a few requests, each with little of its body, may wait behind the one that is answered
- chunked bodies: chunk sizes, extensions and trailers may not outweigh the content
- connections: --max-connections; when all are taken, a new one replaces one whose error is delayed, or the longest idle
- errors: the error rate limit holds for responses of the app and of this module
- lingering: the rest of a refused request is read for a moment, so that a reset does not destroy the response
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from server.core.errors import (
    ApiError,
    BadRequestError,
    HeadTooLargeError,
    NotReadyError,
    RequestTooSlowError,
    kind_of,
)
from server.core.paths import normalize_path
from server.core.request_record import peer_of
from server.http.early_protocol import EarlyProtocol
from server.http.http10 import unchunked
from server.http.raw_response import raw_error
from server.limits.error_rate_limit import ErrorRateLimit, Verdict, is_rate_limited, rate_limited, slow_down

logger = logging.getLogger("twostep.server")

MAX_PIPELINED = 8
"""Requests that may wait behind the one that is answered."""
WRITE_BUFFER_BYTES = 4096
"""Beyond what the system takes, this much of a response waits for its reader; of a stream, tokens wait behind it. Each
write that waits is several objects for the garbage collector, and a stream's writes are small."""
LINGER_S = 2.0
"""Seconds for which the rest of a refused request is read."""
NUM_LINGERING = 64
"""Connections beyond --max-connections that get a 503; further ones are closed without a response."""


class Phase(Enum):
    """The part of a request that the connection reads."""

    BETWEEN = auto()
    """No request has begun: another one may come, or nothing more."""
    HEAD = auto()
    BODY = auto()


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The bounds on connections, and the state that the connections of one server share."""

    max_connections: int
    max_head_bytes: int
    header_timeout_s: float
    on_refusal: Callable[[str], None]
    """Called with the error code of what is refused before there is a request."""
    error_rate_limit: ErrorRateLimit
    waiting: "OrderedDict[BoundedProtocol, None]" = field(default_factory=OrderedDict)
    """Connections without a request under way, the longest idle first."""
    held: "OrderedDict[BoundedProtocol, None]" = field(default_factory=OrderedDict)
    """Connections whose error response is delayed, the longest delayed first."""


class BoundedProtocol(EarlyProtocol):
    """One connection, within the bounds of `ConnectionLimits`."""

    def __init__(self, *args: Any, limits: ConnectionLimits, url_prefix: str = "", **kwargs: Any) -> None:
        """`url_prefix` is what a proxy may have left before the paths."""
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._url_prefix = url_prefix
        self._phase = Phase.BETWEEN
        self._answering: RequestResponseCycle | None = None  # `cycle` is the newest request, perhaps a pipelined one
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._is_refused = False
        self._released = asyncio.Event()  # error responses are not delayed: the client left, or the server stops
        self._has_changed_phase = False  # within the bytes that are being parsed
        self._num_read_bytes = 0  # of the head or of the body, framing included
        self._num_parsed_bytes = 0  # of the head's fields or of the body's content

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        limits, num_over = self._limits, len(self.connections) - self._limits.max_connections
        if num_over > 0 and (idle := limits.held or limits.waiting):
            idle.popitem(last=False)[0]._cut_off()
        elif num_over > NUM_LINGERING:
            self._abort()
            return
        elif num_over > 0:
            self._refuse(NotReadyError("All connections are taken (--max-connections); try again later."))
            return
        self._await_request()
        self._set_timer(limits.header_timeout_s, self._on_slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.waiting.pop(self, None)
        self._set_timer(None)
        self._disconnect_app()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        self._has_changed_phase = False
        try:
            self.feed(data)
        except httptools.HttpParserUpgrade:
            pass  # there is nothing to upgrade to: the request is answered, and no more is read
        except httptools.HttpParserError:
            self._refuse(self._refusal or BadRequestError("The request is not valid HTTP."))
        else:
            if not self._has_changed_phase:  # else it is unknown how many of these bytes belong to the new phase
                self._num_read_bytes += len(data)
            self._check_progress()

    def shutdown(self) -> None:
        self._released.set()
        if self._is_refused:
            return
        if self._phase is Phase.BODY and not self.cycle.response_started:
            self._refuse(NotReadyError("The server is shutting down; send the request to another one."))
        else:
            super().shutdown()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._enter(Phase.HEAD)

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is Phase.BODY:
            return  # a trailer: no handler reads them, and none may pass for a header
        self._count_head(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_head()
        if len(self.pipeline) >= MAX_PIPELINED:
            raise self._refused(BadRequestError("Too many pipelined requests."))
        self._enter(Phase.BODY)
        self._limits.waiting.pop(self, None)
        self._set_timer(None)
        super().on_headers_complete()
        if self.pipeline:  # uvicorn pauses reading here, and would not see the client leave
            self.flow.resume_reading()

    def _check_head(self) -> None:
        """Refuses what RFC 9112 calls for refusing (2.3, 3.2, 6.1): intermediaries would not agree about whom such a
        request is for, or where it ends."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise self._refused(BadRequestError("The request must be of HTTP/1.1 or 1.0."))
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
            raise self._refused(BadRequestError("The request must have one Host header."))
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]) or (codings and version == "1.0"):
            raise self._refused(BadRequestError("Transfer-Encoding must be chunked alone: send the body as it is."))

    def on_body(self, body: bytes) -> None:
        self._num_parsed_bytes += len(body)
        super().on_body(body)
        if self.pipeline and len(self.cycle.body) > HIGH_WATER_LIMIT:
            raise self._refused(BadRequestError("A pipelined request's body is too large."))

    def on_message_complete(self) -> None:
        if self.awaits_body:
            return
        super().on_message_complete()
        self._enter(Phase.BETWEEN)
        if self._has_no_request:
            self._set_timer(None)
            self._await_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase is Phase.BODY and not self.pipeline:
            self._set_timer(LINGER_S, self._abort)
        elif self._has_no_request:
            self._await_request()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        normalize_path(cast(Scope, cycle.scope), self._url_prefix)
        limited_app: Any = rate_limited(app, self._await_turn, self._cut_off)
        if cycle.scope["http_version"] == "1.0":
            limited_app = unchunked(limited_app, cycle)
        super()._start_asgi_task(cycle, limited_app)

    async def _await_turn(self, key_name: str = "") -> Verdict:
        """Waits until the error rate limit lets an error response of this connection go."""
        self._limits.held[self] = None
        try:
            return await self._limits.error_rate_limit.turn(key_name or peer_of(self.client), self._released)
        finally:
            self._limits.held.pop(self, None)

    @property
    def _has_no_request(self) -> bool:
        return self._phase is not Phase.BODY and (self.cycle is None or self.cycle.response_complete)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._has_changed_phase = True
        self._num_read_bytes = self._num_parsed_bytes = 0

    def _await_request(self) -> None:
        self._limits.waiting[self] = None

    def _check_progress(self) -> None:
        """Refuses a head or body that is too large so far; called after bytes that did not complete it."""
        if self._phase is Phase.BODY:
            if self._num_read_bytes > 2 * self._num_parsed_bytes + self._limits.max_head_bytes:
                self._refuse(BadRequestError("The body's chunks carry more framing than content."))
        elif self._num_read_bytes > self._limits.max_head_bytes:
            self._refuse(self._head_too_large())
        elif self._has_no_request and self._timer is None:
            self._set_timer(self._limits.header_timeout_s, self._on_slow_head)

    def _count_head(self, num_bytes: int) -> None:
        self._num_parsed_bytes += num_bytes
        if self._num_parsed_bytes > self._limits.max_head_bytes:
            raise self._refused(self._head_too_large())

    def _head_too_large(self) -> ApiError:
        return HeadTooLargeError(
            f"The request's head exceeds {self._limits.max_head_bytes} bytes (--max-header-bytes)."
        )

    def _on_slow_head(self) -> None:
        if self._phase is Phase.BETWEEN:
            self._abort()  # no request has begun: there is nothing to answer
        else:
            self._refuse(RequestTooSlowError("The request's head took too long (--header-timeout)."))

    def _refused(self, error: ApiError) -> ApiError:
        """Returns the error to raise out of a parser callback, and keeps it: the parser wraps what is raised."""
        self._refusal = error
        return error

    def _refuse(self, error: ApiError) -> None:
        """Answers the request that is being read with an error, then closes the connection. While another request is
        being answered, closes it at once."""
        code = kind_of(type(error)).code
        logger.debug("connection refused: %s: %s", code, error.detail)
        self._limits.on_refusal(code)
        if not self._can_be_answered:
            self._abort()
            return
        self._is_refused = True
        self._disconnect_app()
        self._limits.waiting.pop(self, None)
        self._set_timer(None)
        if is_rate_limited(error.status_code):
            self._released = asyncio.Event()
            self.tasks.add(task := self.loop.create_task(self._send_error_in_turn(error)))
            task.add_done_callback(self.tasks.discard)
        else:
            self._send_error(error)

    async def _send_error_in_turn(self, error: ApiError) -> None:
        verdict = await self._await_turn()
        if verdict is not Verdict.CUT_OFF:
            self._send_error(slow_down() if verdict is Verdict.SLOW_DOWN else error)
        else:
            self._abort()

    def _send_error(self, error: Exception) -> None:
        if self.transport.is_closing():
            return
        self._set_timer(LINGER_S, self._abort)
        self.transport.write(raw_error(error))
        if not self.transport.can_write_eof():  # TLS has no half of a connection to close
            self.transport.close()
            return
        with suppress(OSError):  # the client is gone, as the write above may have shown
            self.transport.write_eof()

    @property
    def _can_be_answered(self) -> bool:
        if self.pipeline or self.transport.is_closing():
            return False
        return self.cycle is None or self.cycle.response_complete or self._is_reading_unanswered

    @property
    def _is_reading_unanswered(self) -> bool:
        return self._phase is Phase.BODY and not self.cycle.response_started

    def _disconnect_app(self) -> None:
        """Makes the app see a disconnected client: it ends the request and writes nothing any more."""
        self._released.set()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def _cut_off(self) -> None:
        """Closes the connection without a response."""
        self._disconnect_app()
        self._abort()

    def _abort(self) -> None:
        self._is_refused = True
        self.transport.abort()

    def _set_timer(self, delay_s: float | None, act: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if delay_s is None or act is None else self.loop.call_later(delay_s, act)
