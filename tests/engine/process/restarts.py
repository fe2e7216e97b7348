"""Helpers that kill engines while streams run on them, and that count restarts and expected tokens."""

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any

from engine.client.async_engine import AsyncEngine
from engine.core.stats import StepShare, StepStats
from tests.engine import fake_engine_process as fake
from tests.engine.async_engines import Recorder, children, collect, eventually, request, tokens_of


class Watcher(Recorder):
    """An observer that counts restarts and keeps the newest statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.num_restarts = 0
        self.stats: StepStats | None = None

    def on_restart(self) -> None:
        self.num_restarts += 1

    def on_step(self, stats: StepStats, shares: Sequence[StepShare] = ()) -> None:
        self.stats = stats


def kill_engine(signal_number: int = signal.SIGKILL) -> None:
    for pid in children():
        os.kill(pid, signal_number)


def streams(engine: AsyncEngine, count: int, max_tokens: int = 30) -> list["asyncio.Task[Any]"]:
    wanted = [request(fake.SLOW, first=i, name=f"r{i}", max_tokens=max_tokens) for i in range(count)]
    return [asyncio.create_task(collect(engine, one)) for one in wanted]


async def all_tokens(tasks: Sequence["asyncio.Task[Any]"]) -> list[list[int]]:
    return [tokens_of(outputs) for outputs in await asyncio.gather(*tasks)]


def expected(count: int, max_tokens: int = 30) -> list[list[int]]:
    return [list(range(i, i + max_tokens)) for i in range(count)]


async def is_down(engine: AsyncEngine) -> None:
    await eventually(lambda: not engine.is_ready)
