"""Prompts that other servers compute: who waits for what, and that nothing waits for ever, whatever ends or dies."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import msgspec
import pytest

from engine.client.async_engine import AsyncEngine
from engine.client.prefill_servers import Prefix
from engine.core.cache_steering import CacheSteering
from engine.core.errors import DeadlineError, RemotePrefillError, RequestAbortedError
from engine.core.generation_request import GenerationRequest
from engine.core.outputs import RequestOutput
from tests.engine import fake_engine_process as fake
from tests.engine.async_engines import Recorder, assert_free, collect, error_of, eventually, request, running, tokens_of


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@dataclass
class FakeServers:
    """Prefill servers that answer when they are told to."""

    min_tokens: int = 10
    asked: list[Prefix] = field(default_factory=list)
    num_cancelled: int = 0
    stored: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def compute(self, prefix: Prefix) -> int:
        self.asked.append(prefix)
        try:
            return await asyncio.shield(self.stored)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def close(self) -> None:
        pass


class Watcher(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.remote: list[int | None] = []
        self.lost: list[int] = []
        self.num_restarts = 0

    def on_restart(self) -> None:
        self.num_restarts += 1

    def on_remote_prefill(self, seconds: float, num_tokens: int | None) -> None:
        assert seconds >= 0
        self.remote.append(num_tokens)

    def on_lost_tokens(self, num_tokens: int) -> None:
        self.lost.append(num_tokens)


def long_request(command: int = fake.PLAIN, num_tokens: int = 50, second: int = 0, **params: Any) -> GenerationRequest:
    """A request whose prompt is long enough; `second` tokens of it are cached."""
    short = request(command, **params)
    first, _, last = short.prompt_token_ids
    return msgspec.structs.replace(short, prompt_token_ids=[first, second, *[5] * (num_tokens - 3), last])


@asynccontextmanager
async def engine_with(
    servers: FakeServers, watcher: Watcher | None = None, **settings: Any
) -> AsyncIterator[AsyncEngine]:
    async with running(prefill_servers=servers, observer=watcher, **settings) as engine:
        yield engine


async def asked(servers: FakeServers, *requests: Coroutine[Any, Any, Any]) -> list["asyncio.Task[Any]"]:
    """Returns the tasks of requests that wait for the servers."""
    tasks = [asyncio.create_task(each) for each in requests]
    await eventually(lambda: len(servers.asked) > 0)
    await asyncio.sleep(0.05)
    return tasks


@in_a_loop
async def test_the_engine_gets_a_request_when_its_prompt_is_stored() -> None:
    servers, watcher = FakeServers(), Watcher()
    async with engine_with(servers, watcher) as engine:
        [task] = await asked(servers, collect(engine, long_request()))
        assert not task.done() and engine.queue_stats.num_waiting_tokens == 50
        servers.stored.set_result(48)
        outputs = await task
        assert tokens_of(outputs) == [100, 101, 102, 103, 104] and outputs[0].num_stored_tokens == 48
    prefix = servers.asked[0]
    assert len(prefix.token_ids) == 49, "three blocks and one token"
    assert watcher.remote == [48] and watcher.lost == [46], "the fake finds two tokens"


@in_a_loop
async def test_the_time_of_the_other_server_is_told_apart_and_all_adds_up() -> None:
    servers = FakeServers()
    async with engine_with(servers) as engine:
        [task] = await asked(servers, collect(engine, long_request()))
        servers.stored.set_result(48)
        timings = (await task)[-1].timings
        assert timings.remote_prefill_s >= 0.05 and timings.queue_s >= 0
        assert timings.queue_s + timings.remote_prefill_s + timings.prefill_s == timings.ttft_s
        assert timings.ttft_s + timings.decode_s == timings.e2e_s
        assert (await collect(engine, request()))[-1].timings.remote_prefill_s is None  # type: ignore[union-attr]


@in_a_loop
async def test_what_the_store_has_is_told_the_other_server() -> None:
    servers = FakeServers()
    async with engine_with(servers) as engine:
        servers.stored.set_result(48)
        await collect(engine, long_request(second=32))
        assert servers.asked[0].num_stored_tokens == 32


@pytest.mark.parametrize(
    "prompt",
    [
        {"num_tokens": 16},  # without a full block before the last token
        {"second": 40},  # of which fewer than ten tokens are not cached
        {"prompt_logprobs": 0},
    ],
)
@in_a_loop
async def test_what_is_not_worth_it_is_computed_here(prompt: dict[str, Any]) -> None:
    servers = FakeServers()
    async with engine_with(servers) as engine:
        assert len(await collect(engine, long_request(**prompt))) == 5
        assert servers.asked == []


@in_a_loop
async def test_an_engine_whose_store_cannot_be_used_asks_nobody() -> None:
    servers = FakeServers()
    async with running("without a store", prefill_servers=servers) as engine:
        assert len(await collect(engine, long_request())) == 5 and servers.asked == []


@in_a_loop
async def test_of_a_model_with_states_what_leads_to_the_last_copy_of_them_is_asked_for() -> None:
    servers = FakeServers()
    async with running("with states", prefill_servers=servers) as engine:
        assert len(await collect(engine, long_request(num_tokens=32))) == 5 and servers.asked == []
        servers.stored.set_result(32)
        assert len(await collect(engine, long_request(num_tokens=50))) == 5
        assert [len(prefix.token_ids) for prefix in servers.asked] == [33]


@in_a_loop
async def test_a_prompt_that_stays_in_memory_is_not_handed_over() -> None:
    servers = FakeServers()
    async with engine_with(servers) as engine:
        steering = CacheSteering(stays_in_memory=True)
        assert len(await collect(engine, msgspec.structs.replace(long_request(), steering=steering))) == 5
        assert servers.asked == []


@pytest.mark.parametrize("error", [RemotePrefillError("It is dead."), ValueError("a bug")])
@in_a_loop
async def test_where_the_other_server_fails_the_engine_computes(error: Exception) -> None:
    servers, watcher = FakeServers(), Watcher()
    async with engine_with(servers, watcher) as engine:
        servers.stored.set_exception(error)
        outputs = await collect(engine, long_request())
        assert len(outputs) == 5 and outputs[0].num_stored_tokens == 0
    assert watcher.remote == ([None] if isinstance(error, RemotePrefillError) else []) and watcher.lost == []


@in_a_loop
async def test_equal_prompts_are_asked_for_once() -> None:
    servers = FakeServers()
    async with engine_with(servers) as engine:
        other = msgspec.structs.replace(long_request(), cache_salt="x")
        same, first = long_request(max_tokens=9), long_request()
        tasks = await asked(servers, *(collect(engine, each) for each in (first, same, other)))
        assert [prefix.request.cache_salt for prefix in servers.asked] == ["", "x"]
        servers.stored.set_result(48)
        assert [len(await task) for task in tasks] == [5, 9, 5]


@in_a_loop
async def test_the_other_server_stops_when_the_last_that_waits_leaves() -> None:
    servers = FakeServers()
    async with engine_with(servers) as engine:
        first, second = await asked(servers, *(collect(engine, long_request(fake.WAIT)) for _ in range(2)))
        first.cancel()
        await asyncio.wait([first])
        assert (len(servers.asked), servers.num_cancelled, engine.num_live) == (1, 0, 1)
        second.cancel()
        await asyncio.wait([second])
        await eventually(lambda: servers.num_cancelled == 1)
        assert engine.num_live == 0 and engine._remote._jobs == {} == engine._remote._questions


@in_a_loop
async def test_a_prompt_is_asked_for_again_after_all_left() -> None:
    servers = FakeServers()
    async with engine_with(servers) as engine:
        [task] = await asked(servers, collect(engine, long_request()))
        task.cancel()
        await asyncio.wait([task])
        servers.stored.set_result(48)
        assert len(await collect(engine, long_request())) == 5
        assert len(servers.asked) == 2


@pytest.mark.parametrize("how", ["deadline", "abort"])
@in_a_loop
async def test_a_request_that_ends_while_it_waits_is_never_given_to_the_engine(how: str) -> None:
    servers, deadline_s = FakeServers(), 0.2 if how == "deadline" else None
    async with engine_with(servers) as engine:
        held = msgspec.structs.replace(long_request(fake.WAIT), client_request_id="g", deadline_s=deadline_s)
        [task] = await asked(servers, error_of(collect(engine, held)))
        if how == "abort":
            assert engine.abort("", "g")
        assert isinstance(await task, DeadlineError if how == "deadline" else RequestAbortedError)
        await eventually(lambda: servers.num_cancelled == 1)
        assert engine.num_live == 0 == engine.queue_stats.num_in_flight
        assert await engine.inspect("", "g", 9) == []


@in_a_loop
async def test_a_request_that_leaves_after_it_was_handed_over_is_aborted_in_the_engine() -> None:
    servers = FakeServers()
    async with engine_with(servers) as engine:
        servers.stored.set_result(48)
        task = asyncio.create_task(collect(engine, long_request(fake.WAIT)))
        await eventually(lambda: len(servers.asked) == 1)
        await asyncio.sleep(0.1)
        task.cancel()
        await assert_free(engine)


@in_a_loop
async def test_waiting_for_the_other_server_is_not_waiting_in_the_queue() -> None:
    servers = FakeServers()
    async with engine_with(servers) as engine:
        held = msgspec.structs.replace(long_request(), max_queue_s=0.3)
        [task] = await asked(servers, collect(engine, held))
        await asyncio.sleep(0.5)
        servers.stored.set_result(48)
        assert len(await task) == 5


@in_a_loop
async def test_an_engine_is_not_hung_that_waits_for_the_other_server_alone() -> None:
    servers, watcher = FakeServers(), Watcher()
    async with engine_with(servers, watcher, max_silence_s=0.4) as engine:
        [task] = await asked(servers, collect(engine, long_request()))
        await asyncio.sleep(1.0)
        assert engine.is_ready and watcher.num_restarts == 0
        servers.stored.set_result(48)
        assert len(await task) == 5 and watcher.num_restarts == 0
        held = asyncio.create_task(error_of(collect(engine, long_request(fake.HANG))))
        await eventually(lambda: watcher.num_restarts > 0)
        held.cancel()


@in_a_loop
async def test_after_that_it_waits_in_the_queue() -> None:
    servers = FakeServers()
    async with engine_with(servers) as engine:
        servers.stored.set_result(48)
        held = msgspec.structs.replace(long_request(fake.WAIT), max_queue_s=0.3)
        assert await error_of(collect(engine, held)) is not None


@in_a_loop
async def test_requests_that_wait_are_held_while_the_engine_dies_and_comes_back() -> None:
    servers = FakeServers()
    async with engine_with(servers) as engine:
        [task] = await asked(servers, collect(engine, long_request()))
        killer = asyncio.create_task(error_of(collect(engine, request(fake.DIE))))
        await eventually(lambda: not engine.is_ready)
        await eventually(lambda: engine.is_ready)
        assert not task.done()
        servers.stored.set_result(48)
        assert len(await task) == 5
        killer.cancel()


@in_a_loop
async def test_an_engine_that_dies_when_it_is_asked_finds_nothing() -> None:
    servers = FakeServers()
    async with engine_with(servers) as engine:
        servers.stored.set_result(48)
        outputs: list[RequestOutput] = await collect(engine, long_request(second=999))
        assert len(outputs) == 5 and servers.asked[0].num_stored_tokens == 0
