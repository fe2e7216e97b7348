"""The engine process that waits for the death of another: it takes its place, and leaves nothing behind."""

import asyncio
import os
import signal
from functools import partial

import pytest

from engine.client.async_engine import AsyncEngine
from engine.process import spare_process
from tests.engine.async_engines import children, eventually, running
from tests.engine.process.restarts import Watcher, all_tokens, expected, streams

pytestmark = pytest.mark.usefixtures("soon")


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_process, "_DELAY_S", 0.0)


def pid_of(engine: AsyncEngine) -> int:
    process = engine._supervisor._process
    assert process is not None and process.pid is not None
    return process.pid


async def spare_of(engine: AsyncEngine) -> int:
    """Waits until there are two processes; returns the one that does not run."""
    await eventually(lambda: len(children()) == 2)
    (spare,) = {*children()} - {pid_of(engine)}
    return spare


def runs_in(engine: AsyncEngine, pid: int) -> bool:
    return engine.is_ready and pid_of(engine) == pid


def test_each_restart_takes_the_process_that_waits() -> None:
    async def check() -> None:
        watcher = Watcher()
        async with running(observer=watcher, keeps_spare=True) as engine:
            tasks = streams(engine, 4, 150)
            for _ in range(3):
                spare = await spare_of(engine)
                await asyncio.sleep(0.3)  # it has been spawned, and may be importing still
                os.kill(pid_of(engine), signal.SIGKILL)
                await eventually(partial(runs_in, engine, spare))
            assert await all_tokens(tasks) == expected(4, 150)
            assert watcher.num_restarts == 3

    asyncio.run(check())
    assert children() == set()


def test_a_spare_process_that_was_stopped_goes_on() -> None:
    async def check() -> None:
        async with running(keeps_spare=True) as engine:
            tasks = streams(engine, 2, 40)
            os.kill(await spare_of(engine), signal.SIGSTOP)
            os.kill(pid_of(engine), signal.SIGKILL)
            assert await asyncio.wait_for(all_tokens(tasks), 30.0) == expected(2, 40)

    asyncio.run(check())
    assert children() == set()


@pytest.mark.parametrize("kills_engine_first", [True, False])
def test_a_spare_process_that_died_is_not_missed(kills_engine_first: bool) -> None:
    async def check() -> None:
        async with running(keeps_spare=True) as engine:
            tasks = streams(engine, 2, 40)
            victims = [await spare_of(engine), pid_of(engine)]
            await asyncio.sleep(0.3)
            for pid in reversed(victims) if kills_engine_first else victims:
                os.kill(pid, signal.SIGKILL)
            assert await all_tokens(tasks) == expected(2, 40)
            assert await spare_of(engine) not in victims

    asyncio.run(check())
    assert children() == set()


def test_a_server_that_stops_ends_both() -> None:
    async def check(waits: bool) -> None:
        async with running(keeps_spare=True) as engine:
            if waits:
                await spare_of(engine)

    for waits in (True, False):
        asyncio.run(check(waits))
        assert children() == set()


def test_without_memory_for_it_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_process, "system_available_bytes", lambda: (1 << 30) - 1)

    async def check() -> None:
        async with running(keeps_spare=True) as engine:
            await asyncio.sleep(0.5)
            assert children() == {pid_of(engine)}

    asyncio.run(check())
