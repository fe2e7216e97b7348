"""The streamed response of APIs with choices: one event per step, which usually is a token."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Protocol

from engine.core.outputs import RequestOutput
from server.core.errors import ErrorKind, describe, log_failure
from server.core.request_record import RequestRecord
from server.core.timings import usage_metrics
from server.generation.fan_out import IndexedOutput
from server.generation.plan import GenerationPlan
from server.generation.sse import DONE, EventHead, event
from server.generation.usage import UsageCounter
from server.protocol.generation import GenerationParams


class StreamedChoice(Protocol):
    """Formats the outputs of one generation, in their order."""

    def chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Returns what the output adds to its choice, one entry of `choices` per event: none while text is held back,
        at least one for the last output, and for the first one where the first event has fields of its own."""


FirstEventFields = Callable[[RequestOutput], Mapping[str, Any]]
"""Makes the fields that the first event has beside its choices, from the first output."""


def no_fields(_: RequestOutput) -> Mapping[str, Any]:
    return {}


def note_failure(error: Exception, record: RequestRecord) -> tuple[ErrorKind, dict[str, Any]]:
    """Notes a failure in log and record. Returns its kind, and the error's body for the client, whose response has
    begun."""
    kind, body = describe(error, record.request_id)
    record.broken_by = kind.code
    log_failure(error, record.request_id)
    return kind, body


class GenerationStream:
    """Turns the outputs of one plan into server-sent events."""

    def __init__(
        self,
        plan: GenerationPlan[GenerationParams],
        choices: Sequence[StreamedChoice],
        counter: UsageCounter,
        record: RequestRecord,
        first_event_fields: FirstEventFields,
    ) -> None:
        options = plan.request.stream_options
        self._choices = choices
        self._counter = counter
        self._record = record
        self._first_event_fields = first_event_fields
        self._head = EventHead(plan.head)
        self._include_usage = options is not None and options.include_usage is True
        self._continuous_usage = options is not None and options.sends_usage_so_far

    async def events(
        self, first: IndexedOutput, outputs: AsyncGenerator[IndexedOutput, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yields all events from the first token to `[DONE]`. An error from here on is an event: the status is sent."""
        try:
            if events := await self._events_of(first, self._first_event_fields(first[1])):
                yield events
            async for indexed_output in outputs:
                if events := await self._events_of(indexed_output, {}):
                    yield events
            if self._include_usage:
                usage = self._counter.usage()
                yield self._head.event([], usage=usage, metrics=usage_metrics(self._counter.timings()))
        except Exception as error:
            _, body = note_failure(error, self._record)
            yield event(body)
        yield DONE

    async def _events_of(self, indexed_output: IndexedOutput, first_fields: Mapping[str, Any]) -> bytes:
        index, output = indexed_output
        self._counter.add(index, output)
        choices = self._choices[index].chunks(output)
        beside: list[dict[str, Any]] = [{} for _ in choices]
        if first_fields:
            beside[0] |= first_fields
        if output.is_finished and output.timings is not None:
            beside[-1]["timings"] = self._counter.timings_of(index)
        events = [await self._event(output, *each) for each in zip(choices, beside, strict=True)]
        return b"".join(events)

    async def _event(self, output: RequestOutput, choice: dict[str, Any], extra: Mapping[str, Any]) -> bytes:
        if output.prompt_logprobs is None:
            return self._head.event([choice], **self._usage_so_far(), **extra)
        return await self._head.chunked_event([choice], **self._usage_so_far(), **extra)

    def _usage_so_far(self) -> dict[str, Any]:
        if self._continuous_usage:
            return {"usage": self._counter.usage()}
        return {"usage": None} if self._include_usage else {}
