"""Collecting the outputs of generations, and joining those of one."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import TypeVar

from engine.core.outputs import RequestOutput
from server.generation.fan_out import IndexedOutput
from server.generation.usage import UsageCounter

_NUM_JOINED = 64

T = TypeVar("T")


async def collect(outputs: AsyncGenerator[IndexedOutput, None], counter: UsageCounter) -> list[list[RequestOutput]]:
    """Returns each generation's outputs, when all have ended. Most of them are joined, which takes less memory, but not
    those with log-probabilities: which of these belong to which part of the text is known output by output."""
    joined = [list[RequestOutput]() for _ in range(counter.num_generations)]
    newest = [list[RequestOutput]() for _ in range(counter.num_generations)]
    async for generation, output in outputs:
        counter.add(generation, output)
        own = newest[generation]
        own.append(output)
        if len(own) == _NUM_JOINED and not any(each.logprobs for each in own):
            joined[generation].append(join_outputs(own))
            own.clear()
    return [before + rest for before, rest in zip(joined, newest, strict=True)]


async def in_turns(items: Iterable[T]) -> list[T]:
    """Returns the items, each of which takes a while to make; other tasks have their turns after each."""
    made = list[T]()
    for item in items:
        made.append(item)
        await asyncio.sleep(0)
    return made


def join_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Returns outputs of one sequence, in their order, as one."""
    first, last = outputs[0], outputs[-1]
    if first is last:
        return first
    return RequestOutput(
        text="".join(output.text for output in outputs),
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        logprobs=tuple(score for output in outputs for score in output.logprobs),
        prompt_logprobs=first.prompt_logprobs,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
        num_output_tokens=last.num_output_tokens,
        timings=last.timings,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
