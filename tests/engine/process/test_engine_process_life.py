"""The engine process behind an AsyncEngine: failures, silence, signals, and nothing left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.client.async_engine import AsyncEngine
from engine.core.config import EngineConfig
from engine.core.errors import (
    EngineFailedError,
    EngineUnavailableError,
    ModelError,
    ModelMemoryError,
    TwostepError,
)
from tests.engine import fake_engine_process as fake
from tests.engine.async_engines import (
    COMMAND,
    Words,
    children,
    collect,
    cpu_s,
    error_of,
    eventually,
    request,
    running,
)

# Failures


def test_a_failed_step_ends_its_own_requests_only() -> None:
    async def check() -> None:
        async with running() as engine:
            other = asyncio.create_task(collect(engine, request(fake.SLOW, name="other")))
            with pytest.raises(EngineFailedError, match="a bad step"):
                await collect(engine, request(fake.FAIL))
            assert len(await other) == 5 and engine.is_ready

    asyncio.run(check())


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("missing", ModelError, "The model is missing"),
        ("large", ModelMemoryError, "The model is too large"),
        ("broken", EngineUnavailableError, "a broken loader"),
        ("dies", EngineUnavailableError, "exit code 7.*last words"),
    ],
)
def test_a_start_that_fails_reports_why(model: str, kind: type[TwostepError], message: str) -> None:
    async def check() -> None:
        with pytest.raises(kind, match=message):
            async with running(model):
                pass
        assert children() == set()

    asyncio.run(check())


def test_an_engine_that_is_silent_while_idle_is_healthy() -> None:
    async def check() -> None:
        async with running(max_silence_s=0.2) as engine:
            await asyncio.sleep(0.5)
            engine.check_health()
            task = asyncio.create_task(collect(engine, request()))
            await asyncio.sleep(0)
            assert engine.num_live == 1
            engine.check_health()
            assert len(await task) == 5

    asyncio.run(check())


def test_a_silent_engine_is_unavailable_and_no_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.process.engine_process._STOP_GRACE_S", 0.1)

    async def check() -> None:
        async with running() as engine:
            task = asyncio.create_task(error_of(collect(engine, request(fake.HANG))))
            await eventually(lambda: engine.num_live == 1)
            engine._watchdog._reset_at_s -= 10_000.0
            with pytest.raises(EngineUnavailableError, match="silent for 1") as raised:
                engine.check_health()
            assert not isinstance(raised.value, EngineFailedError)
            task.cancel()

    asyncio.run(check())


def test_an_engine_that_works_is_healthy_however_long() -> None:
    async def check() -> None:
        async with running(max_silence_s=1.5) as engine:
            assert len(await collect(engine, request(fake.SLOW, max_tokens=100))) == 100

    asyncio.run(check())


@pytest.mark.slow
def test_a_pause_of_the_server_is_not_the_engines_silence() -> None:
    async def check() -> None:
        async with running(max_silence_s=0.5) as engine:
            task = asyncio.create_task(error_of(collect(engine, request(fake.HANG))))
            await eventually(lambda: engine.num_live == 1)
            time.sleep(1.0)
            paused_until_s = time.monotonic()
            assert isinstance(await task, EngineFailedError)
            assert time.monotonic() - paused_until_s > 0.4

    asyncio.run(check())


# Nothing left behind


def test_stop_leaves_nothing() -> None:
    async def check() -> None:
        open_fds = set(os.listdir("/proc/self/fd"))
        async with running() as engine:
            stream = engine.generate(request(fake.SLOW, max_tokens=3000))
            await anext(stream)
            assert len(children()) == 1
        with pytest.raises(EngineUnavailableError, match="stopped"):
            [output async for output in stream]
        await asyncio.sleep(0)
        assert children() == set()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert set(os.listdir("/proc/self/fd")) <= open_fds
        await engine.stop()

    asyncio.run(check())


def test_the_engines_end_of_the_link_is_its_own() -> None:
    """The server closes the engine's end: else the connection would not end with the engine."""

    async def check() -> None:
        async with running() as engine:
            process = engine._supervisor._process
            assert process is not None and process._link.engine_end.fileno() == -1

    asyncio.run(check())


def test_a_load_can_be_stopped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.process.engine_process._STOP_GRACE_S", 1000.0)

    async def check() -> None:
        engine = AsyncEngine(EngineConfig(model="slow"), command=COMMAND)
        start = asyncio.create_task(error_of(engine.start(Words())))
        await eventually(lambda: len(children()) == 1)
        await asyncio.wait_for(engine.stop(), 20)
        assert isinstance(await start, EngineUnavailableError)
        assert children() == set()

    asyncio.run(check())


def test_a_process_that_was_spawned_is_the_one_that_starts() -> None:
    async def check() -> None:
        engine = AsyncEngine(EngineConfig(model="fake"), command=COMMAND)
        await engine.spawn()
        (child,) = children()
        await engine.start(Words())
        assert children() == {child}
        assert len(await collect(engine, request())) == 5
        await engine.stop()

    asyncio.run(check())


@pytest.mark.parametrize("is_started", [False, True])
def test_what_was_spawned_ends_unstarted_or_dead(is_started: bool) -> None:
    async def check() -> None:
        engine = AsyncEngine(EngineConfig(model="fake"), command=COMMAND)
        await engine.spawn()
        if is_started:
            os.kill(children().pop(), signal.SIGKILL)
            assert isinstance(await error_of(engine.start(Words())), EngineFailedError)
        await asyncio.wait_for(engine.stop(), 20)
        assert children() == set()

    asyncio.run(check())


def test_idle_takes_no_cpu_time() -> None:
    async def check() -> None:
        async with running() as engine:
            await collect(engine, request())
            (child,) = children()
            before_s = time.process_time() + cpu_s(child)
            await asyncio.sleep(1.5)
            assert time.process_time() + cpu_s(child) - before_s < 0.2

    asyncio.run(check())


def test_signals_are_for_the_server_to_decide() -> None:
    async def check() -> None:
        async with running() as engine:
            (child,) = children()
            assert os.getsid(child) != os.getsid(0)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(child, number)
            assert len(await collect(engine, request())) == 5
            assert children() == {child}  # and not another one in its place
        assert children() == set()

    asyncio.run(check())


@pytest.mark.parametrize("command", [fake.WAIT, fake.SLOW, fake.HANG])
def test_the_engine_ends_when_the_server_is_killed(command: int, tmp_path: Path) -> None:
    script = (
        "import asyncio, sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from tests.engine import async_engines as t\n"
        "async def main():\n"
        "    async with t.running() as engine:\n"
        "        asyncio.ensure_future(t.collect(engine, t.request(int(sys.argv[2]), max_tokens=4000)))\n"
        "        hangs = int(sys.argv[2]) == t.fake.HANG\n"
        "        await t.eventually(lambda: engine.num_live == 1 if hangs else t.held_by(engine) == 1)\n"
        "        print(*t.children(), flush=True)\n"
        "        time.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    root = str(Path(__file__).resolve().parents[3])
    arguments = [sys.executable, "-c", script, root, str(command)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        child = Path("/proc", server.stdout.readline().strip())
        assert child.exists()
        server.kill()
    asyncio.run(eventually(lambda: not child.exists() or "Z" in (child / "stat").read_text().split()[2]))
    assert list(tmp_path.iterdir()) == []
