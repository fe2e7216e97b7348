"""An observer that raises costs lines of the log, and no stream anything."""

import asyncio
import logging
from typing import Any

import pytest

from engine.client.observer import EngineObserver
from tests.engine.async_engines import collect, request, running, tokens_of

METHODS = [name for name in vars(EngineObserver) if name.startswith("on_")]


class BrokenObserver:
    """Raises whatever it is told."""

    def __getattr__(self, name: str) -> Any:
        def fail(*args: object) -> None:
            raise ValueError(f"{name} is broken")

        return fail


def test_streams_are_whole_though_every_number_raises(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        observer: Any = BrokenObserver()
        async with running(observer=observer) as engine:
            assert len(tokens_of(await collect(engine, request()))) == 5
            assert engine.is_ready and engine.num_live == 0

    with caplog.at_level(logging.ERROR):
        asyncio.run(check())
    told = {name for name in METHODS if f"{name} is broken" in caplog.text}
    assert told == set(METHODS) - {"on_restart", "on_remote_prefill", "on_lost_tokens"}  # nothing of these happened
