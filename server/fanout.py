"""Several generations of one HTTP request as one stream of outputs."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from engine.client import EngineClient, GenerationRequest
from engine.errors import EngineFailedError
from engine.outputs import RequestOutput
from engine.request import FinishReason

IndexedOutput = tuple[int, RequestOutput]
"""The generation's position among its siblings, and its news."""


async def generate_all(
    engine: EngineClient, generations: Sequence[GenerationRequest]
) -> AsyncGenerator[IndexedOutput, None]:
    """Run all concurrently; outputs come as they arise. Closing it, or the failure of one, aborts all the others."""
    if len(generations) == 1:
        async with aclosing(engine.generate(generations[0])) as outputs:
            async for output in outputs:
                yield 0, _sound(output)
        return
    news: asyncio.Queue[IndexedOutput | Exception] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(engine, index, each, news)) for index, each in enumerate(generations)]
    num_live = len(tasks)
    try:
        while num_live:
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            num_live -= item[1].is_finished
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    engine: EngineClient, index: int, generation: GenerationRequest, news: asyncio.Queue[IndexedOutput | Exception]
) -> None:
    try:
        async with aclosing(engine.generate(generation)) as outputs:
            async for output in outputs:
                news.put_nowait((index, _sound(output)))
    except Exception as error:
        news.put_nowait(error)


def _sound(output: RequestOutput) -> RequestOutput:
    """An engine that ends a request it was not told to end owes the client an error, not a short answer."""
    if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        raise EngineFailedError("The engine ended the request before it was complete.", output.finish_reason)
    return output
