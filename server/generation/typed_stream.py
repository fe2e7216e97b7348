"""The streamed response of APIs whose events have types: events of its beginning, of its blocks, and of its end or
failure."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Protocol

from engine.core.outputs import RequestOutput
from server.core.errors import ErrorKind
from server.core.request_record import RequestRecord
from server.generation.fan_out import IndexedOutput
from server.generation.resume_points import NO_RESUME_POINTS, ResumePoints
from server.generation.sse import chunked_typed_event, typed_event
from server.generation.stream import note_failure
from server.generation.usage import UsageCounter

Events = Iterable[Mapping[str, Any]]


class Writer(Protocol):
    """Writes one answer as events, from its outputs in their order."""

    def begin(self) -> Events:
        """Returns the first events. The first output has been counted, and is added next."""

    def add(self, output: RequestOutput) -> Events: ...

    def end(self) -> Events: ...

    def fail(self, kind: ErrorKind, message: str) -> Events:
        """Returns the last events of an answer that failed, instead of those of `end`."""


class TypedStream:
    """Turns the outputs of a plan of one generation into server-sent events, or what a subclass encodes."""

    def __init__(
        self,
        writer: Writer,
        counter: UsageCounter,
        record: RequestRecord,
        points: ResumePoints = NO_RESUME_POINTS,
    ) -> None:
        self._writer = writer
        self._counter = counter
        self._record = record
        self._points = points

    async def events(
        self, first: IndexedOutput, outputs: AsyncGenerator[IndexedOutput, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yields all events from the first token on. An error from here on is an event, for the status is sent."""
        try:
            self._counter.add(*first)
            yield self._encoded(self._writer.begin()) + self._added(first[1])
            async for indexed_output in outputs:
                if data := self._events_of(indexed_output):
                    yield data
            for each in self._writer.end():
                await asyncio.sleep(0)
                yield await self.encode_last(each)
        except Exception as error:
            kind, body = note_failure(error, self._record)
            yield self._points.before_failure(kind) + self._encoded(self._writer.fail(kind, body["error"]["message"]))

    def _events_of(self, indexed_output: IndexedOutput) -> bytes:
        self._counter.add(*indexed_output)
        return self._added(indexed_output[1])

    def _added(self, output: RequestOutput) -> bytes:
        return self._encoded(self._writer.add(output)) + self._points.behind(output)

    def _encoded(self, events: Events) -> bytes:
        return b"".join(map(self.encode, events))

    def encode(self, event: Mapping[str, Any]) -> bytes:
        return typed_event(event)

    async def encode_last(self, event: Mapping[str, Any]) -> bytes:
        """Returns the same bytes for an event of the end, which may contain the logprobs of all tokens once more."""
        return await chunked_typed_event(event)
