"""Reads one response inside the socket's callbacks: the client's hot path, one short call per read."""

import asyncio
import json
import time

from loadtest.collector import SERVER_TIMINGS, StreamCollector, error_message
from loadtest.errors import ProtocolError
from loadtest.http1 import ResponseParser
from loadtest.record import Outcome
from loadtest.sse import SSEParser

_MAX_ERROR_BODY_BYTES = 65_536


class ResponseReader(asyncio.Protocol):
    """Parses one response. `ended` is done when nothing more is to come; call `verdict` only then."""

    def __init__(self, collector: StreamCollector) -> None:
        self.response = ResponseParser()
        self.collector = collector
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.problem = ""  # how the response broke HTTP/1.1
        self._error_body = bytearray()
        self._events = SSEParser()

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if self.ended.done():
            return
        try:
            pieces = self.response.feed(data)
        except ProtocolError as error:
            self._end(str(error))
            return
        for piece in pieces:
            if self.is_stream:
                for event in self._events.feed(piece):
                    self.collector.on_event(event, now_s)
            elif len(self._error_body) < _MAX_ERROR_BODY_BYTES:
                self._error_body += piece
        if self.response.is_complete:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended.done():
            return
        try:
            self.response.feed_eof()
        except ProtocolError as error:
            self._end(f"{error} ({exc})" if exc else str(error))
            return
        self._end()

    def _end(self, problem: str = "") -> None:
        self.problem = problem
        self.ended.set_result(None)

    @property
    def is_stream(self) -> bool:
        return self.response.status == 200 and "text/event-stream" in self.response.headers.get("content-type", "")

    def verdict(self) -> tuple[Outcome, str]:
        """Returns the outcome of the response, and the reason if it is not OK."""
        status = self.response.status
        if status is not None and status != 200:
            return (Outcome.REJECTED if status == 429 else Outcome.HTTP_ERROR), self._error_message()
        if self.is_stream and self.collector.has_failed:
            return self.collector.verdict()  # an error event says more than the broken end that may follow it
        if self.problem:
            return Outcome.BROKEN, self.problem
        if not self.is_stream:
            content_type = self.response.headers.get("content-type", "none")
            return Outcome.BROKEN, f"200, but not an event stream (Content-Type: {content_type})"
        return self.collector.verdict()

    def _error_message(self) -> str:
        try:
            return error_message(json.loads(self._error_body))
        except ValueError:
            text = self._error_body.decode(errors="replace").strip()[:300]
            return text or self.problem or self._message_of_empty_body()

    def _message_of_empty_body(self) -> str:
        """Returns the message of an error with an empty body; of a redirection, which is not followed, its location."""
        location = self.response.headers.get("location")
        return f"status {self.response.status}" + (f": it is at {location}" if location else ", and no word why")

    @property
    def retry_after_s(self) -> float | None:
        return _number(self.response.headers.get("retry-after"))

    @property
    def server_ms(self) -> dict[str, float]:
        """The server's own timings, from the X-...-Ms headers and the stream; those of the stream win."""
        headers = {name: _number(self.response.headers.get(f"x-{name.replace('_', '-')}")) for name in SERVER_TIMINGS}
        return {name: value for name, value in headers.items() if value is not None} | self.collector.server_ms


def _number(text: str | None) -> float | None:
    """Returns the value of a header if it is a number >= 0, else None: Retry-After may be a date."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None
