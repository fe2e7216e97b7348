"""Whatever an engine process dies of, another one follows it: requests that kill it are refused, all others go on."""

import asyncio
import logging
import signal
import time

import pytest

from engine.core.errors import EngineFailedError
from engine.core.generation_request import GenerationRequest
from tests.engine import fake_engine_process as fake
from tests.engine.async_engines import children, collect, error_of, eventually, held_by, request, running
from tests.engine.process.restarts import Watcher, all_tokens, expected, kill_engine, streams

pytestmark = pytest.mark.usefixtures("soon")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        pytest.param(fake.DIE, "signal 9", marks=pytest.mark.slow),
        (fake.CRASH, "signal 11"),
        pytest.param(fake.EXIT, "exit code 5", marks=pytest.mark.slow),
        pytest.param(fake.RAISE, "a broken kernel", marks=pytest.mark.slow),
        pytest.param(fake.HANG, "silent for", marks=pytest.mark.slow),
        pytest.param(fake.STUMBLE, "signal 9", marks=pytest.mark.slow),
        pytest.param(fake.CHOKE, "exit code 9", marks=pytest.mark.slow),
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
