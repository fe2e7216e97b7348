"""An engine process that dies is followed by another one, and streams go on: real child processes, a fake engine."""

import asyncio
import errno
import logging
import os
import signal
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest

from engine.async_engine import AsyncEngine
from engine.client import SOLE_TENANT, GenerationRequest
from engine.config import EngineConfig
from engine.errors import EngineFailedError, EngineGivenUpError, EngineRestartingError, EngineUnavailableError
from engine.request import FinishReason
from engine.stats import PoolStats, StepStats
from engine.waiting_room import RoomLimits
from tests.engine import fake_engine_process as fake
from tests.engine.async_engines import (
    COMMAND,
    Recorder,
    Words,
    children,
    collect,
    error_of,
    eventually,
    held_by,
    request,
    running,
    text_of,
    tokens_of,
)


class Watcher(Recorder):
    """Counts restarts and keeps the newest numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_restarts = 0
        self.stats: StepStats | None = None

    def on_restart(self) -> None:
        self.num_restarts += 1

    def on_step(self, stats: StepStats) -> None:
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


# Streams go on


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


def test_tokens_that_nobody_has_read_yet_are_not_made_twice() -> None:
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


def test_without_room_requests_are_told_when_the_engine_should_be_up() -> None:
    async def check() -> None:
        async with running(max_num_seqs=1, limits=RoomLimits(max_waiting=1)) as engine:
            tasks = streams(engine, 2)
            await eventually(lambda: held_by(engine) == 2)
            kill_engine()
            await is_down(engine)
            with pytest.raises(EngineRestartingError, match="being restarted") as refused:
                await collect(engine, request())
            assert refused.value.retry_after_s >= 1
            with pytest.raises(EngineRestartingError, match="being restarted"):
                engine.check_room(SOLE_TENANT)
            assert await all_tokens(tasks) == expected(2)

    asyncio.run(check())


def test_who_leaves_during_the_restart_is_not_taken_up_again() -> None:
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


# Other deaths


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (fake.DIE, "signal 9"),
        (fake.CRASH, "signal 11"),
        (fake.EXIT, "exit code 5"),
        (fake.RAISE, "a broken kernel"),
        (fake.HANG, "silent for"),
        (fake.STUMBLE, "signal 9"),
        (fake.CHOKE, "exit code 9"),
    ],
)
def test_a_request_that_kills_is_refused_and_all_others_go_on(
    command: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with running(max_silence_s=1.0 if command == fake.HANG else 30.0) as engine:
            tasks = streams(engine, 4)
            await eventually(lambda: held_by(engine) == 4)
            error = await error_of(collect(engine, request(command, name="poison")))
            assert isinstance(error, EngineFailedError) and "request poison/4 and nothing else" in str(error)
            assert await all_tokens(tasks) == expected(4)
            assert len(await collect(engine, request())) == 5 and engine.is_ready

    with caplog.at_level(logging.WARNING):
        asyncio.run(check())
    assert words in caplog.text and "request poison/4 is refused" in caplog.text


def test_two_requests_that_kill_are_both_found() -> None:
    async def check() -> None:
        async with running(max_restarts=5) as engine:
            tasks = streams(engine, 3)
            await eventually(lambda: held_by(engine) == 3)
            kinds = (fake.CRASH, fake.DIE)
            errors = await asyncio.gather(*(error_of(collect(engine, request(kind))) for kind in kinds))
            assert all(isinstance(error, EngineFailedError) for error in errors)
            assert await all_tokens(tasks) == expected(3)

    asyncio.run(check())


def test_finding_the_guilty_one_counts_as_getting_on() -> None:
    async def check() -> None:
        async with running(max_restarts=3) as engine:
            errors = await asyncio.gather(*(error_of(collect(engine, request(fake.CRASH))) for _ in range(3)))
            assert all("nothing else" in str(error) for error in errors) and engine.is_ready

    asyncio.run(check())


def test_a_stopped_engine_is_killed_and_followed_by_another() -> None:
    async def check() -> None:
        async with running(max_silence_s=1.0) as engine:
            tasks = streams(engine, 3)
            await eventually(lambda: held_by(engine) == 3)
            (stopped,) = children()
            kill_engine(signal.SIGSTOP)
            assert await all_tokens(tasks) == expected(3)
            assert stopped not in children()

    asyncio.run(check())


def test_a_request_that_cannot_be_sent_fails_alone() -> None:
    async def check() -> None:
        async with running() as engine:
            tasks = streams(engine, 1)
            odd = GenerationRequest(
                request_id="odd",
                prompt_token_ids=[1],
                params=request().params,
                arrival_s=time.monotonic(),
                cache_salt="\ud800",
            )
            assert isinstance(await error_of(collect(engine, odd)), EngineFailedError)
            assert await all_tokens(tasks) == expected(1) and engine.num_live == 0

    asyncio.run(check())


def test_an_idle_engine_is_restarted_whenever_it_dies() -> None:
    async def check() -> None:
        watcher = Watcher()
        async with running(observer=watcher, max_restarts=1) as engine:
            for num_restarts in range(1, 4):
                kill_engine()
                await eventually(lambda n=num_restarts: watcher.num_restarts == n and engine.is_ready)  # type: ignore[misc]
            assert len(await collect(engine, request())) == 5

    asyncio.run(check())


# Giving up


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


@pytest.mark.parametrize(("how", "words"), [("vanishes", "The model is missing"), ("changes", "not the one")])
def test_a_model_that_is_gone_or_another_one_ends_the_restarts(how: str, words: str, tmp_path: Any) -> None:
    async def check() -> None:
        async with running(f"{how}:{tmp_path}") as engine:
            (task,) = streams(engine, 1)
            await eventually(lambda: held_by(engine) == 1)
            kill_engine()
            (error,) = await asyncio.gather(task, return_exceptions=True)
            assert words in str(error)
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
    monkeypatch.setattr("engine.supervisor._LOAD_GRACE_S", 0.0)

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
        engine = AsyncEngine(EngineConfig(model="dies"), Words(), command=COMMAND, observer=watcher)
        assert isinstance(await error_of(engine.start()), EngineFailedError)
        assert watcher.num_restarts == 0 and children() == set()

    asyncio.run(check())
