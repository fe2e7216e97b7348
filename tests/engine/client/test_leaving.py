"""A caller that leaves an AsyncEngine frees what its request held, with one abort for the engine."""

import asyncio
from contextlib import aclosing

import pytest

from tests.engine import fake_engine_process as fake
from tests.engine.async_engines import (
    aborts_of,
    collect,
    eventually,
    held_by,
    request,
    running,
)


@pytest.mark.parametrize("num_outputs", [0, 1, 3])
def test_a_caller_that_leaves_frees_the_engine(num_outputs: int) -> None:
    async def check() -> None:
        async with running() as engine:
            stream = engine.generate(request(fake.SLOW if num_outputs else fake.WAIT, max_tokens=3000))
            for _ in range(num_outputs):
                await anext(stream)
            if num_outputs == 0:
                waiting = asyncio.ensure_future(anext(stream))
                await eventually(lambda: held_by(engine) == 1)
                waiting.cancel()
                await asyncio.wait((waiting,))
            await stream.aclose()
            assert engine.num_live == 0
            await eventually(lambda: (held_by(engine), aborts_of(engine)) == (0, 1))

    asyncio.run(check())


def test_a_cancelled_task_frees_the_engine() -> None:
    async def check() -> None:
        async with running() as engine:
            task = asyncio.create_task(collect(engine, request(fake.SLOW, max_tokens=3000)))
            await eventually(lambda: held_by(engine) == 1)
            task.cancel()
            await eventually(lambda: (held_by(engine), engine.num_live) == (0, 0))

    asyncio.run(check())


def test_callers_that_leave_together_are_one_message() -> None:
    async def check() -> None:
        async with running() as engine:
            tasks = [asyncio.create_task(collect(engine, request(fake.WAIT, name=f"r{i}"))) for i in range(30)]
            await eventually(lambda: held_by(engine) == 30)
            for task in tasks:
                task.cancel()
            await eventually(lambda: aborts_of(engine) == 30)
            assert engine.last_stats and engine.last_stats.prefix_queries == 1

    asyncio.run(check())


def test_what_the_engine_has_finished_is_not_aborted() -> None:
    async def check() -> None:
        async with running() as engine:
            async with aclosing(engine.generate(request())) as unread:
                await anext(unread)
                await eventually(lambda: engine.last_stats is not None and held_by(engine) == 0)
            await collect(engine, request())
            assert engine.last_stats and engine.last_stats.prefix_queries == 0

    asyncio.run(check())
