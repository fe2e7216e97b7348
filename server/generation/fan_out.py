"""Several generations of one HTTP request as one stream of outputs."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from engine.client.interface import EngineClient, GenerationRequest
from engine.core.errors import DeadlineError, EngineFailedError, RequestAbortedError
from engine.core.outputs import RequestOutput
from engine.core.request import FinishReason

IndexedOutput = tuple[int, RequestOutput]
"""The generation's position among its siblings, and its news."""

_News = tuple[int, RequestOutput | Exception]


async def generate_all(
    engine: EngineClient, generations: Sequence[GenerationRequest]
) -> AsyncGenerator[IndexedOutput, None]:
    """Run all concurrently; outputs come as they arise. Closing it, or the failure of one, aborts all the others."""
    if len(generations) == 1:
        async with aclosing(engine.generate(generations[0])) as outputs:
            async for output in outputs:
                yield 0, _sound(output)
        return
    news: asyncio.Queue[_News] = asyncio.Queue()
    has_begun = False
    unbegun = deque(enumerate([generations[0], *(replace(each, is_sibling=True) for each in generations[1:])]))
    tasks = [asyncio.create_task(_pump_next(engine, unbegun, news)) for _ in generations]
    num_live = len(tasks)
    try:
        while num_live:
            index, item = await news.get()
            if has_begun and (cut := _cut_by(item, generations[index])) is not None:
                item = _ended_without_token(generations[index], cut)
            if isinstance(item, Exception):
                raise item
            has_begun = True
            num_live -= item.is_finished
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump_next(
    engine: EngineClient, unbegun: deque[tuple[int, GenerationRequest]], news: asyncio.Queue[_News]
) -> None:
    """They begin in their order. None begins after one was refused."""
    if not unbegun:
        return
    index, generation = unbegun.popleft()
    try:
        async with aclosing(engine.generate(generation)) as outputs:
            async for output in outputs:
                news.put_nowait((index, _sound(output)))
    except Exception as error:
        if _cut_by(error, generation) is None:
            unbegun.clear()
        news.put_nowait((index, error))


def _cut_by(item: RequestOutput | Exception, generation: GenerationRequest) -> str | None:
    """The stop reason of one that asks for tokens and may end without any: it is aborted, or its deadline is over."""
    if generation.params.max_tokens == 0:
        return None
    if isinstance(item, DeadlineError):
        return "deadline"
    return "abort" if isinstance(item, RequestAbortedError) else None


def _ended_without_token(generation: GenerationRequest, stop_reason: str) -> RequestOutput:
    """While a sibling has had tokens: the response has begun, so it ends as they do."""
    return RequestOutput(
        request_id=generation.request_id,
        text="",
        token_ids=(),
        num_prompt_tokens=len(generation.prompt_token_ids),
        num_cached_tokens=0,
        num_output_tokens=0,
        finish_reason=FinishReason.LENGTH,
        stop_reason=stop_reason,
    )


def _sound(output: RequestOutput) -> RequestOutput:
    """An engine that ends a request it was not told to end owes the client an error, not a short answer."""
    if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        raise EngineFailedError("The engine ended the request before it was complete.", output.finish_reason)
    return output
