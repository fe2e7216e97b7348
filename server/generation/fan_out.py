"""Fan-out: several generations of one HTTP request as one stream of outputs."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from engine.client.interface import EngineClient
from engine.core.errors import DeadlineError, EngineFailedError, RequestAbortedError
from engine.core.generation_request import GenerationRequest
from engine.core.outputs import RequestOutput
from engine.core.request import FinishReason

IndexedOutput = tuple[int, RequestOutput]
"""The generation's index among its siblings, and an output of it."""

_IndexedResult = tuple[int, RequestOutput | Exception]


async def generate_all(
    engine: EngineClient, generations: Sequence[GenerationRequest]
) -> AsyncGenerator[IndexedOutput, None]:
    """Run all concurrently, and yield their outputs as they come. Closing it, or the failure of one, aborts all
    others."""
    if len(generations) == 1:
        async with aclosing(engine.generate(generations[0])) as outputs:
            async for output in outputs:
                yield 0, _checked(output)
        return
    # Bounded, so that each generation knows when its outputs are not read any more.
    results: asyncio.Queue[_IndexedResult] = asyncio.Queue(len(generations))
    has_started = False
    siblings = (msgspec.structs.replace(each, is_sibling=True) for each in generations[1:])
    not_started = deque(enumerate([generations[0], *siblings]))
    tasks = [asyncio.create_task(_pump_next(engine, not_started, results)) for _ in generations]
    num_live = len(tasks)
    try:
        while num_live:
            index, result = await results.get()
            if has_started and (stop_reason := _early_stop_reason(result, generations[index])) is not None:
                result = _ended_without_token(generations[index], stop_reason)
            if isinstance(result, Exception):
                raise result
            has_started = True
            num_live -= result.is_finished
            yield index, result
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump_next(
    engine: EngineClient, not_started: deque[tuple[int, GenerationRequest]], results: asyncio.Queue[_IndexedResult]
) -> None:
    """Starts the next generation and queues its outputs. They start in their order, and none after one was refused."""
    if not not_started:
        return
    index, generation = not_started.popleft()
    try:
        async with aclosing(engine.generate(generation)) as outputs:
            async for output in outputs:
                await results.put((index, _checked(output)))
    except Exception as error:
        if _early_stop_reason(error, generation) is None:
            not_started.clear()
        await results.put((index, error))


def _early_stop_reason(result: RequestOutput | Exception, generation: GenerationRequest) -> str | None:
    """Returns the stop reason of a generation that may end without a token, because it was aborted or missed its
    deadline; None for other results, and where no tokens are asked for."""
    if generation.params.max_tokens == 0:
        return None
    if isinstance(result, DeadlineError):
        return "deadline"
    return "abort" if isinstance(result, RequestAbortedError) else None


def _ended_without_token(generation: GenerationRequest, stop_reason: str) -> RequestOutput:
    """Returns the only output of a generation that ends without a token while siblings have some: the response has
    begun, so it cannot end with an error."""
    return RequestOutput(
        text="",
        token_ids=(),
        num_prompt_tokens=len(generation.prompt_token_ids),
        num_cached_tokens=0,
        num_output_tokens=0,
        finish_reason=FinishReason.LENGTH,
        stop_reason=stop_reason,
    )


def _checked(output: RequestOutput) -> RequestOutput:
    """Returns the output. Raises EngineFailedError if the engine ended a request that nobody aborted: the client gets
    an error, not a short answer."""
    if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        raise EngineFailedError("The engine ended the request before it was complete.", output.finish_reason)
    return output
