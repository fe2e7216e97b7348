"""Snapshots of live requests are right, cost the engine little, and never take long."""

import asyncio
import os
import signal
from contextlib import aclosing

import pytest

from engine.client.async_engine import AsyncEngine
from engine.core.errors import EngineUnavailableError
from engine.core.messages import RequestState
from engine.core.request_snapshot import RequestSnapshot
from tests.engine import fake_engine_process as fake
from tests.engine.async_engines import children, collect, eventually, grouped, running
from tests.engine.fakes import add, batches, fake_engine, run_to_end

# What the scheduler knows


def test_the_state_of_a_prompt_in_chunks_shows_how_far_it_is() -> None:
    engine = fake_engine(block_size=4, max_num_batched_tokens=6)
    add(engine, "a", range(1, 15), max_tokens=2)
    states = []
    while engine.has_work:
        states += engine.inspect(["a"])
        engine.step()
    running = [RequestState("a", True, None, computed, 0, 4) for computed in (6, 12, 14)]
    assert states == [RequestState("a", num_before=0), *running] and engine.inspect(["a"]) == []


def test_the_place_in_the_queue_is_that_among_the_tenants_own() -> None:
    engine = fake_engine(max_num_seqs=1)
    add(engine, "running")
    engine.step()
    for name, priority, tenant in (("a", 1, ""), ("b", 1, ""), ("c", 0, ""), ("d", 5, "other")):
        add(engine, name, priority=priority, tenant=tenant)
    assert [state.num_before for state in engine.inspect(["running", *"abcd"])] == [None, 1, 2, 0, 0]
    assert engine.inspect(["c", "unknown"]) == [RequestState("c", num_before=0)]


def test_cached_tokens_are_reported_and_shared_blocks_count_for_each() -> None:
    engine = fake_engine(block_size=4)
    for name in "ab":
        add(engine, name, range(1, 10), max_tokens=4)
        engine.step()
    engine.step()
    assert engine.inspect("ab") == [RequestState("a", True, None, 10, 0, 3), RequestState("b", True, None, 9, 8, 3)]


def test_a_preempted_request_waits_and_holds_nothing() -> None:
    engine = fake_engine(num_blocks=6, block_size=2, enable_prefix_caching=False)
    for name in "ab":
        add(engine, name, [7, 7, ord(name) % 50], max_tokens=8)
    while engine._scheduler.stats.num_preemptions == 0:
        engine.step()
    assert engine.inspect(["b"]) == [RequestState("b", was_scheduled=True, num_before=0)]


def test_inspecting_changes_nothing() -> None:
    plain, asked = fake_engine(num_blocks=12, block_size=2), fake_engine(num_blocks=12, block_size=2)
    for engine in (plain, asked):
        for name in "abcd":
            add(engine, name, [3, ord(name) % 50, 5], max_tokens=6)
    while asked.has_work:
        asked.inspect("abcd")
        asked.step()
    run_to_end(plain)
    assert batches(asked) == batches(plain)


# What the server reports


async def only_view(engine: AsyncEngine, client_request_id: str | None = "g") -> RequestSnapshot:
    (view,) = await engine.inspect("", client_request_id, 10)
    return view


def test_what_the_engine_and_the_server_know_is_reported() -> None:
    async def check() -> None:
        async with running() as engine, aclosing(engine.generate(grouped(fake.SLOW, max_tokens=1000))) as stream:
            outputs = [await anext(stream) for _ in range(3)]
            view = await only_view(engine)
            assert view.state is not None and 3 <= view.state.num_computed_tokens <= view.num_output_tokens
            assert (view.client_request_id, view.num_prompt_tokens) == ("g", 3)
            assert outputs[0].timings is not None and view.ttft_s == pytest.approx(outputs[0].timings.ttft_s)
            assert view.queue_s == outputs[0].timings.queue_s
            assert view.left_s is not None and view.left_s > 0.019 * 900

    asyncio.run(check())


def test_before_the_first_token_no_end_is_predicted() -> None:
    async def check() -> None:
        async with running() as engine:
            waiting = asyncio.create_task(collect(engine, grouped(fake.WAIT)))
            await eventually(lambda: engine.num_live == 1)
            view = await only_view(engine)
            assert (view.num_output_tokens, view.queue_s, view.ttft_s, view.left_s) == (0, None, None, None)
            engine.abort("", "g")
            await asyncio.wait([waiting])
            assert await engine.inspect("", None, 10) == []

    asyncio.run(check())


def test_a_tenant_sees_its_own_requests_the_oldest_first() -> None:
    async def check() -> None:
        async with running() as engine:
            names = [("", "b"), ("", "a"), ("other", "a"), ("", "a")]
            for number, (tenant, name) in enumerate(names):
                asked = grouped(fake.WAIT, tenant=tenant, client_request_id=name)
                task = asyncio.create_task(collect(engine, asked))
                await eventually(lambda number=number: engine.num_live == number + 1)
                task.add_done_callback(lambda done: done.exception())
            queries = [("", None, 9), ("", "a", 9), ("", None, 2), ("x", None, 9)]
            answers = [await engine.inspect(*query) for query in queries]
            assert ["".join(view.client_request_id for view in views) for views in answers] == ["baa", "aa", "ba", ""]

    asyncio.run(check())


def test_callers_that_come_meanwhile_share_one_query() -> None:
    async def check() -> None:
        async with running() as engine:
            tasks = [asyncio.create_task(collect(engine, grouped(fake.WAIT, client_request_id=name))) for name in "012"]
            await eventually(lambda: engine.num_live == 3)
            views = await asyncio.gather(*(only_view(engine, str(number)) for number in range(3)))
            assert [view.state and view.state.num_blocks for view in views] == [1, 2, 2]
            assert (await only_view(engine, "1")).state == RequestState(views[1].state.request_id, num_blocks=1)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    asyncio.run(check())


def test_what_is_cached_is_asked_for_in_the_same_query() -> None:
    async def check() -> None:
        async with running() as engine:
            engine.drop_prefixes("alice", "x")
            asking = [engine.cached_prefixes(tenant) for tenant in ("alice", "bob", "alice")]
            assert [[each.key for each in found] for found in await asyncio.gather(*asking)] == [["x"], [], ["x"]]

    asyncio.run(check())


def test_an_engine_that_does_not_tell_what_is_cached_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.client.request_inspector.ANSWER_TIMEOUT_S", 0.1)

    async def check() -> None:
        async with running() as engine:
            (pid,) = children()
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(EngineUnavailableError, match="does not answer"):
                await engine.cached_prefixes("")
            os.kill(pid, signal.SIGCONT)

    asyncio.run(check())


def test_an_engine_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.client.request_inspector.ANSWER_TIMEOUT_S", 0.1)

    async def check() -> None:
        async with running() as engine:
            waiting = asyncio.create_task(collect(engine, grouped(fake.WAIT)))
            await eventually(lambda: engine.last_stats is not None)
            (pid,) = children()
            os.kill(pid, signal.SIGSTOP)
            assert [(await only_view(engine)).state for _ in range(2)] == [None, None]
            os.kill(pid, signal.SIGCONT)
            monkeypatch.setattr("engine.client.request_inspector.ANSWER_TIMEOUT_S", 20.0)
            assert (await only_view(engine)).state is not None
            waiting.cancel()
            await asyncio.wait([waiting])

    asyncio.run(check())


def test_queries_to_an_engine_that_dies_are_answered_and_the_next_one_is_queried() -> None:
    async def check() -> None:
        async with running() as engine, aclosing(engine.generate(grouped(fake.SLOW))) as stream:
            await anext(stream)
            other = asyncio.create_task(collect(engine, grouped(fake.WAIT, client_request_id="h")))
            await eventually(lambda: engine.num_live == 2)
            (pid,) = children()
            os.kill(pid, signal.SIGSTOP)
            asking = [asyncio.create_task(only_view(engine, client_request_id)) for client_request_id in "ghh"]
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
            first, second = [RequestState(live.engine_id) for live in engine._registry]
            assert [(await each).state for each in asking] == [first, second, second]
            assert not engine.is_ready and (await only_view(engine)).state == first
            await eventually(lambda: engine.is_ready)
            while (state := (await only_view(engine)).state) in (None, first):  # it may not have run yet
                await asyncio.sleep(0.005)
            assert state is not None and (state.num_computed_tokens > 0, state.num_blocks) == (True, 1)
            other.cancel()
            await asyncio.wait([other])

    asyncio.run(check())
