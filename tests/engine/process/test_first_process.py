"""The first engine process, spawned before the client that starts it."""

import asyncio
import errno
from typing import Any

import pytest

from engine.client.async_engine import AsyncEngine
from engine.core.config import EngineConfig
from engine.process.first_process import FirstProcess, first_process
from tests.engine.async_engines import COMMAND, Words, children, collect, request


def test_an_engine_starts_with_it_and_spawns_none() -> None:
    async def answer(first: FirstProcess | None) -> int:
        (child,) = children()
        engine = AsyncEngine(EngineConfig(model="fake"), command=COMMAND, first=first)
        await engine.spawn()
        await engine.start(Words())
        assert children() == {child}
        num_tokens = len(await collect(engine, request()))
        await engine.stop()
        return num_tokens

    with asyncio.Runner() as runner, first_process(runner, COMMAND) as first:
        assert runner.run(answer(first)) == 5
    assert children() == set()


def test_one_that_nobody_starts_ends_with_the_context() -> None:
    with pytest.raises(KeyboardInterrupt), asyncio.Runner() as runner, first_process(runner, COMMAND) as first:
        assert first is not None and len(children()) == 1
        raise KeyboardInterrupt
    assert children() == set() and first.kv_memory.fd == -1


def test_without_one_the_engine_spawns_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EAGAIN, "no process")

    with asyncio.Runner() as runner, monkeypatch.context() as patch:
        patch.setattr("asyncio.create_subprocess_exec", fail)
        with first_process(runner, COMMAND) as first:
            assert first is None
