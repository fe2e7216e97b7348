"""An engine that keeps dying is given up; a restart that fails in passing is tried again; nothing is left behind."""

import asyncio
import errno
import os
from typing import Any

import pytest

from engine.client.async_engine import AsyncEngine
from engine.core.config import EngineConfig
from engine.core.errors import EngineFailedError, EngineGivenUpError, EngineUnavailableError
from engine.core.request import FinishReason
from tests.engine import fake_engine_process as fake
from tests.engine.async_engines import (
    COMMAND,
    Words,
    children,
    collect,
    error_of,
    eventually,
    held_by,
    request,
    running,
)
from tests.engine.process.restarts import Watcher, all_tokens, expected, is_down, kill_engine, streams

pytestmark = pytest.mark.usefixtures("soon")


async def give_up(engine: AsyncEngine, error: BaseException | None) -> None:
    assert isinstance(error, EngineFailedError)
    assert not engine.is_ready and engine.num_live == 0 and children() == set()
    with pytest.raises(EngineGivenUpError, match=str(error)[:20]):
        engine.check_health()
    with pytest.raises(EngineGivenUpError):
        await collect(engine, request())


def test_an_engine_that_keeps_dying_is_given_up() -> None:
    async def check() -> None:
        async with running(max_restarts=1) as engine:
            tasks = [asyncio.create_task(error_of(collect(engine, request(kind)))) for kind in [fake.DIE] * 3]
            for error in await asyncio.gather(*tasks):
                assert "keeps dying" in str(error) and "signal 9" in str(error)
                await give_up(engine, error)

    asyncio.run(check())


def test_without_restarts_the_first_death_is_the_end() -> None:
    async def check() -> None:
        watcher = Watcher()
        async with running(max_restarts=0, observer=watcher) as engine:
            (task,) = streams(engine, 1)
            await eventually(lambda: held_by(engine) == 1)
            kill_engine()
            (error,) = await asyncio.gather(task, return_exceptions=True)
            await give_up(engine, error)
        assert watcher.num_restarts == 0 and watcher.ends[0][0] is FinishReason.ERROR

    asyncio.run(check())


def test_the_traceback_of_the_engine_is_for_the_log() -> None:
    async def check() -> None:
        async with running(max_restarts=0) as engine:
            error = await error_of(collect(engine, request(fake.RAISE)))
        assert isinstance(error, EngineFailedError) and "a broken kernel" in str(error)
        assert "Traceback" in error.detail and "Traceback" not in str(error)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("how", "words"), [("vanishes", "The model is missing."), ("changes", "loaded first: another weight_bytes.")]
)
def test_a_model_that_is_gone_or_another_one_ends_the_restarts(how: str, words: str, tmp_path: Any) -> None:
    async def check() -> None:
        async with running(f"{how}:{tmp_path}") as engine:
            (task,) = streams(engine, 1)
            await eventually(lambda: held_by(engine) == 1)
            kill_engine()
            (error,) = await asyncio.gather(task, return_exceptions=True)
            assert str(error).endswith(words)
            await give_up(engine, error)

    asyncio.run(check())


@pytest.mark.parametrize("how", ["stumbles", "starves"])
def test_a_restart_that_dies_while_loading_or_lacks_memory_is_tried_again(how: str, tmp_path: Any) -> None:
    async def check() -> None:
        watcher = Watcher()
        async with running(f"{how}:{tmp_path}", observer=watcher) as engine:
            tasks = streams(engine, 2)
            await eventually(lambda: held_by(engine) == 2)
            kill_engine()
            assert await all_tokens(tasks) == expected(2)
        assert watcher.num_restarts == 2

    asyncio.run(check())


def test_a_restart_that_keeps_dying_while_loading_is_given_up(tmp_path: Any) -> None:
    async def check() -> None:
        watcher = Watcher()
        async with running(f"dies:{tmp_path}", observer=watcher, max_restarts=2) as engine:
            (task,) = streams(engine, 1)
            await eventually(lambda: watcher.num_tokens > 0)
            kill_engine()
            (error,) = await asyncio.gather(task, return_exceptions=True)
            await give_up(engine, error)
        assert watcher.num_restarts == 2

    asyncio.run(check())


def test_a_restart_that_hangs_is_killed_and_tried_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.process.supervisor._LOAD_GRACE_S", 0.0)

    async def check() -> None:
        watcher = Watcher()
        async with running(f"freezes:{tmp_path}", observer=watcher) as engine:
            (task,) = streams(engine, 1)
            await eventually(lambda: held_by(engine) == 1)
            kill_engine()
            assert await all_tokens([task]) == expected(1)
        assert watcher.num_restarts == 2

    asyncio.run(check())


def test_a_passing_lack_of_files_does_not_end_the_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_sockets() -> Any:
        monkeypatch.undo()
        raise OSError(errno.EMFILE, "Too many open files")

    async def check() -> None:
        watcher = Watcher()
        async with running(observer=watcher) as engine:
            tasks = streams(engine, 2)
            await eventually(lambda: held_by(engine) == 2)
            monkeypatch.setattr("socket.socketpair", no_sockets)
            kill_engine()
            assert await all_tokens(tasks) == expected(2)
        assert watcher.num_restarts == 2

    asyncio.run(check())


@pytest.mark.parametrize("model", ["fake", "freezes"])
def test_a_restart_can_be_stopped(model: str, tmp_path: Any) -> None:
    async def check() -> None:
        watcher = Watcher()
        async with running(f"{model}:{tmp_path}", observer=watcher) as engine:
            (task,) = streams(engine, 1)
            await eventually(lambda: held_by(engine) == 1)
            kill_engine()
            await eventually(lambda: watcher.num_restarts == 1)
            await asyncio.wait_for(engine.stop(), 20)
            (error,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(error, EngineUnavailableError) and "stopped" in str(error)
            assert children() == set()

    asyncio.run(check())


def test_restarts_leave_no_descriptors_and_no_tasks() -> None:
    async def check() -> None:
        async with running() as engine:
            for _ in range(2):
                open_fds = len(os.listdir("/proc/self/fd"))
                kill_engine()
                await is_down(engine)
                await eventually(lambda: engine.is_ready)
                assert len(await collect(engine, request())) == 5
                assert len(os.listdir("/proc/self/fd")) == open_fds
            assert len(asyncio.all_tasks()) <= 3  # this one, and one that waits for the process's end

    asyncio.run(check())


def test_a_start_that_fails_is_not_tried_again() -> None:
    async def check() -> None:
        watcher = Watcher()
        engine = AsyncEngine(EngineConfig(model="dies"), command=COMMAND, observer=watcher)
        assert isinstance(await error_of(engine.start(Words())), EngineFailedError)
        assert watcher.num_restarts == 0 and children() == set()

    asyncio.run(check())
