"""Runs a plan: up to its first token for a stream, to its end for a whole response."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

from starlette.requests import Request

from engine.core.outputs import RequestOutput
from server.core.request_record import record_of
from server.core.timings import first_token_headers
from server.generation.fan_out import IndexedOutput, generate_all
from server.generation.outputs import collect
from server.generation.plan import GenerationPlan
from server.generation.sse import EVENT_STREAM, KEEP_ALIVE, EventStream
from server.generation.stream import FirstEventFields, GenerationStream, StreamedChoice, no_fields
from server.generation.usage import UsageCounter
from server.generation.whole_answer import reserve_memory
from server.protocol.generation import GenerationParams
from server.runtime.context import context_of


class Events(Protocol):
    """Turns outputs into server-sent events."""

    def events(
        self, first: IndexedOutput, outputs: AsyncGenerator[IndexedOutput, None]
    ) -> AsyncGenerator[bytes, None]: ...


async def stream_response(
    plan: GenerationPlan[GenerationParams],
    choices: Sequence[StreamedChoice],
    counter: UsageCounter,
    request: Request,
    first_event_fields: FirstEventFields = no_fields,
) -> EventStream:
    """Returns the stream of an endpoint whose responses have choices."""
    return await open_stream(
        plan, GenerationStream(plan, choices, counter, record_of(request.scope), first_event_fields), request
    )


async def open_stream(
    plan: GenerationPlan[GenerationParams],
    stream: Events,
    request: Request,
    keep_alive: bytes = KEEP_ALIVE,
    media_type: str = EVENT_STREAM,
) -> EventStream:
    """Returns the stream when its first token is there: until then errors have a status, and the headers can have the
    time to first token."""
    context = context_of(request)
    outputs = generate_all(context.backend.engine, plan.generations)
    try:
        first = await anext(outputs)
        return EventStream(
            stream.events(first, outputs),
            outputs,
            first_token_headers(first[1], len(plan.prompts), plan.num_prompt_tokens),
            context.settings.stall_timeout,
            keep_alive,
            media_type,
        )
    except BaseException:
        await outputs.aclose()
        raise


async def all_outputs(
    plan: GenerationPlan[GenerationParams], counter: UsageCounter, request: Request
) -> list[list[RequestOutput]]:
    """Returns the outputs of each generation. The memory that the answer may take is reserved first, until it is
    written: raises BadRequestError or OverloadedError where there is none for it."""
    reserve_memory(request, plan.answer_bytes)
    async with aclosing(generate_all(context_of(request).backend.engine, plan.generations)) as outputs:
        return await collect(outputs, counter)
