"""Streams continue where the engine process died, in its successor: real child processes with a fake engine."""

import asyncio
import signal
import time
from contextlib import aclosing
from typing import Any

import pytest

from engine.client.admission import AdmissionLimits
from engine.client.async_engine import AsyncEngine
from engine.core.errors import EngineRestartingError
from engine.core.generation_request import SOLE_TENANT
from engine.core.stats import PoolStats
from tests.engine import fake_engine_process as fake
from tests.engine.async_engines import children, collect, eventually, held_by, request, running, text_of, tokens_of
from tests.engine.process.restarts import Watcher, all_tokens, expected, is_down, kill_engine, streams

pytestmark = pytest.mark.usefixtures("soon")


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSEGV])
def test_streams_go_on_where_the_engine_died(signal_number: int) -> None:
    async def check() -> None:
        watcher = Watcher()
        async with running(observer=watcher) as engine:
            tasks = streams(engine, 8)
            await eventually(lambda: watcher.num_tokens > 80)
            kill_engine(signal_number)
            assert await all_tokens(tasks) == expected(8)
            assert (engine.num_live, watcher.num_restarts, len(children())) == (0, 1, 1)
            engine.check_health()

    asyncio.run(check())


def test_no_token_is_lost_when_a_step_cannot_be_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's tokens reach some requests and not the others; the next engine process makes those once more."""

    async def check() -> None:
        watcher = Watcher()
        async with running(observer=watcher) as engine:
            tasks = streams(engine, 4)
            await eventually(lambda: watcher.num_tokens > 20)
            put, failures = engine._registry.put, iter([False, True])

            def put_once_less(*args: Any) -> None:
                if next(failures, False):
                    raise ValueError("a bug")
                put(*args)

            monkeypatch.setattr(engine._registry, "put", put_once_less)
            assert await all_tokens(tasks) == expected(4)
            assert watcher.num_restarts == 1

    asyncio.run(check())


def test_an_engine_may_die_many_times_while_streams_get_on() -> None:
    async def check() -> None:
        watcher = Watcher()
        async with running(observer=watcher, max_restarts=2) as engine:
            tasks = streams(engine, 4, max_tokens=40)
            for num_restarts in range(6):
                seen = watcher.num_tokens
                await eventually(lambda seen=seen: watcher.num_tokens > seen + 12)  # type: ignore[misc]
                kill_engine()
                await eventually(lambda n=num_restarts: watcher.num_restarts == n + 1)  # type: ignore[misc]
            assert await all_tokens(tasks) == expected(4, 40)
        assert (watcher.num_first, watcher.num_tokens, len(watcher.ends)) == (4, 160, 4)

    asyncio.run(check())


def test_a_request_is_one_to_its_observers_whatever_dies() -> None:
    async def check() -> None:
        watcher = Watcher()
        async with running(observer=watcher) as engine:
            (task,) = streams(engine, 1)
            await eventually(lambda: watcher.num_tokens > 5)
            kill_engine()
            outputs = await task
        assert [output.num_output_tokens for output in outputs] == list(range(1, 31))
        assert {(output.num_prompt_tokens, output.num_cached_tokens) for output in outputs} == {(3, 2)}
        timings = outputs[-1].timings
        assert timings and timings.queue_s + timings.prefill_s + timings.decode_s == timings.e2e_s
        assert len(timings.inter_token_s) == 29 and max(timings.inter_token_s) > 0.04
        assert [output.timings is not None for output in outputs] == [True, *[False] * 28, True]

    asyncio.run(check())


def test_tokens_that_are_not_read_yet_are_not_made_twice() -> None:
    async def check() -> None:
        async with running() as engine, aclosing(engine.generate(request(fake.SLOW, max_tokens=30))) as stalled:
            first = await anext(stalled)
            await asyncio.sleep(0.2)
            kill_engine()
            await is_down(engine)
            assert tokens_of([first, *[output async for output in stalled]]) == list(range(100, 130))

    asyncio.run(check())


def test_a_stop_string_is_found_across_the_restart() -> None:
    async def check() -> None:
        async with running() as engine:
            stream = engine.generate(request(fake.SLOW, max_tokens=3000, stop=("w104 w105",)))
            outputs = [await anext(stream) for _ in range(5)]
            kill_engine()
            outputs += [output async for output in stream]
        assert text_of(outputs) == "w100 w101 w102 w103 "
        assert outputs[-1].stop_reason == "w104 w105"

    asyncio.run(check())


def test_requests_that_arrive_during_the_restart_wait_for_it() -> None:
    async def check() -> None:
        async with running() as engine:
            kill_engine()
            await is_down(engine)
            tasks = streams(engine, 3)
            assert await all_tokens(tasks) == expected(3)

    asyncio.run(check())


async def killed_with_two(engine: AsyncEngine) -> list["asyncio.Task[Any]"]:
    """Kills the engine while two requests run, waits until it is down, and returns the tasks of these requests."""
    tasks = streams(engine, 2)
    await eventually(lambda: held_by(engine) == 2)
    kill_engine()
    await is_down(engine)
    return tasks


def test_refusals_during_the_restart_tell_when_the_engine_should_be_up() -> None:
    async def check() -> None:
        async with running(max_num_seqs=1, limits=AdmissionLimits(max_waiting=1)) as engine:
            tasks = await killed_with_two(engine)
            with pytest.raises(EngineRestartingError, match="being restarted") as refused:
                await collect(engine, request())
            assert refused.value.retry_after_s >= 1
            with pytest.raises(EngineRestartingError, match="being restarted"):
                engine.check_admission(SOLE_TENANT)
            assert await all_tokens(tasks) == expected(2)

    asyncio.run(check())


def test_once_the_engine_is_up_its_downtime_refuses_no_request() -> None:
    async def check() -> None:
        async with running(max_num_seqs=1, limits=AdmissionLimits(max_queue_s=1e6)) as engine:
            tasks = await killed_with_two(engine)
            down_s = time.monotonic()
            await eventually(lambda: engine.is_ready)
            assert engine.queue_stats.predicted_wait_s < 2 * (time.monotonic() - down_s)
            assert await all_tokens(tasks) == expected(2)

    asyncio.run(check())


def test_a_request_that_is_cancelled_during_the_restart_is_not_continued() -> None:
    async def check() -> None:
        async with running() as engine:
            (task,) = streams(engine, 1, max_tokens=3000)
            await eventually(lambda: held_by(engine) == 1)
            kill_engine()
            await is_down(engine)
            task.cancel()
            await asyncio.wait((task,))
            assert len(await collect(engine, request())) == 5
            assert (held_by(engine), engine.num_live) == (0, 0)

    asyncio.run(check())


def test_during_the_restart_all_wait_and_no_block_is_held() -> None:
    async def check() -> None:
        watcher = Watcher()
        async with running(observer=watcher) as engine:
            tasks = streams(engine, 3)
            await eventually(lambda: held_by(engine) == 3)
            kill_engine()
            await is_down(engine)
            tasks += streams(engine, 1)
            await eventually(lambda: engine.num_live == 4)
            stats = watcher.stats
            assert stats is engine.last_stats and stats is not None
            assert (stats.num_running, stats.num_waiting, stats.pool) == (0, 4, PoolStats(1000, 0, 0))
            engine.check_health()
            await asyncio.gather(*tasks)

    asyncio.run(check())
