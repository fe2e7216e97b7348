"""The engine's numbers know of every end, once `settle` has returned."""

import asyncio
import time

import pytest

from engine.client.aborts import Aborts
from engine.core.messages import AbortRequests
from tests.engine import fake_engine_process as fake
from tests.engine.async_engines import collect, held_by, request, running


@pytest.mark.parametrize("command", [fake.SLOW, fake.PLAIN])
def test_the_numbers_after_an_abort_are_there(command: int) -> None:
    async def check() -> None:
        async with running() as engine:
            for number in range(5):
                stream = engine.generate(request(command, name=f"r{number}", max_tokens=3000))
                await anext(stream)
                await stream.aclose()
                await engine.settle(20.0)
                assert held_by(engine) == 0

    asyncio.run(check())


def test_where_nothing_was_aborted_there_is_nothing_to_wait_for() -> None:
    async def check() -> None:
        async with running() as engine:
            await engine.settle(20.0)
            await collect(engine, request(fake.PLAIN))
            started_s = time.monotonic()
            await engine.settle(20.0)
            assert held_by(engine) == 0 and time.monotonic() - started_s < 5

    asyncio.run(check())


def test_it_waits_no_longer_than_it_may() -> None:
    async def check() -> None:
        sent: list[AbortRequests] = []
        aborts = Aborts(sent.append)
        aborts.add("a")
        aborts.add("b")
        aborts.on_stats(1)
        started_s = time.monotonic()
        await aborts.settle(0.05)
        assert time.monotonic() - started_s >= 0.04
        aborts.on_stats(2)
        await asyncio.wait_for(aborts.settle(20.0), 5)
        aborts.add("c")
        aborts.on_restart()
        await asyncio.wait_for(aborts.settle(20.0), 5)
        await asyncio.sleep(0)
        assert [message.request_ids for message in sent] == [["a", "b"], ["c"]]

    asyncio.run(check())
