"""What comes out of an AsyncEngine: streams, stop strings, refusals, and what is reported to an observer."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
import uvloop

from engine.client.admission import AdmissionLimits
from engine.client.async_engine import AsyncEngine
from engine.core.config import EngineConfig
from engine.core.errors import ContextLengthError, EngineUnavailableError, OverloadedError, RequestError
from engine.core.generation_request import Tenant
from engine.core.request import FinishReason
from engine.core.stats import StepShare, StepStats
from tests.engine import fake_engine_process as fake
from tests.engine.async_engines import (
    COMMAND,
    Recorder,
    Words,
    aborts_of,
    collect,
    error_of,
    eventually,
    grouped,
    held_by,
    request,
    running,
    text_of,
    tokens_of,
)

# Streams


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_stream_has_one_output_per_token_in_order(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def check() -> None:
        async with running() as engine:
            outputs = await collect(engine, request())
        assert [output.token_ids for output in outputs] == [(100 + i,) for i in range(5)]
        assert [output.text for output in outputs] == [f"w{100 + i} " for i in range(5)]
        assert [output.num_output_tokens for output in outputs] == [1, 2, 3, 4, 5]
        assert [output.finish_reason for output in outputs] == [None] * 4 + [FinishReason.LENGTH]

    run(check())


def test_every_output_knows_the_prompt_and_how_much_of_it_was_cached() -> None:
    async def check() -> None:
        async with running() as engine:
            outputs = await collect(engine, request())
        assert {(output.num_prompt_tokens, output.num_cached_tokens) for output in outputs} == {(3, 2)}

    asyncio.run(check())


def test_the_engine_knows_a_request_by_what_the_client_calls_it() -> None:
    async def check() -> None:
        wanted = grouped(fake.SLOW, client_request_id="mine")
        async with running() as engine, aclosing(engine.generate(wanted)) as stream:
            await anext(stream)
            assert [live.engine_id for live in engine._registry] == ["mine/0"]

    asyncio.run(check())


def test_streams_do_not_mix() -> None:
    async def check() -> None:
        async with running() as engine:
            wanted = [request(fake.PLAIN if i % 2 else fake.SLOW, first=i, name=f"r{i}") for i in range(64)]
            streams = await asyncio.gather(*(collect(engine, one) for one in wanted))
            assert engine.num_live == 0
        assert [tokens_of(outputs) for outputs in streams] == [list(range(i, i + 5)) for i in range(64)]

    asyncio.run(check())


def test_requests_may_share_an_id() -> None:
    async def check() -> None:
        async with running() as engine:
            streams = await asyncio.gather(*(collect(engine, request(first=i)) for i in (10, 20)))
        assert [tokens_of(outputs)[0] for outputs in streams] == [10, 20]

    asyncio.run(check())


def test_queue_prefill_and_decode_add_up() -> None:
    async def check() -> None:
        async with running() as engine:
            wanted = request(fake.SLOW)
            outputs = await collect(engine, wanted)
            now_s = time.monotonic()
        first, last = outputs[0].timings, outputs[-1].timings
        assert first and last and all(output.timings is None for output in outputs[1:-1])
        assert first.inter_token_s == () and first.ttft_s == last.ttft_s
        assert len(last.inter_token_s) == 4 and min(last.inter_token_s) > 0
        assert last.queue_s + last.prefill_s + last.decode_s == last.e2e_s <= now_s - wanted.arrival_s

    asyncio.run(check())


def test_several_tokens_of_a_step_come_as_one_output() -> None:
    async def check() -> None:
        async with running() as engine:
            outputs = await collect(engine, request(fake.BURST))
        assert [output.token_ids for output in outputs] == [(100, 101, 102), (103, 104)]
        timings = outputs[-1].timings
        assert timings and [gap > 0 for gap in timings.inter_token_s] == [False, False, True, False]

    asyncio.run(check())


def test_a_request_for_no_tokens_is_answered_and_its_prompt_counted() -> None:
    async def check() -> None:
        recorder = Recorder()
        async with running(observer=recorder) as engine:
            (output,) = await collect(engine, request(max_tokens=0))
        assert (output.token_ids, output.finish_reason) == ((), FinishReason.LENGTH)
        assert (recorder.num_prompt_tokens, recorder.num_first, recorder.num_tokens) == (3, 0, 0)
        assert output.timings is not None and output.timings.e2e_s > 0

    asyncio.run(check())


def test_a_stalled_reader_costs_the_others_nothing() -> None:
    async def check() -> None:
        async with running() as engine, aclosing(engine.generate(request(max_tokens=100))) as stalled:
            await anext(stalled)
            assert len(await collect(engine, request(fake.SLOW, first=500))) == 5
            assert tokens_of([output async for output in stalled]) == list(range(101, 200))

    asyncio.run(check())


# Stop strings and stop tokens


def test_a_stop_string_ends_the_stream_and_the_engines_work() -> None:
    async def check() -> None:
        async with running() as engine:
            outputs = await collect(engine, request(fake.SLOW, max_tokens=3000, stop=("2 w103",)))
            assert (text_of(outputs), tokens_of(outputs)) == ("w100 w101 w10", [100, 101, 102, 103])
            assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, "2 w103")
            await eventually(lambda: (held_by(engine), aborts_of(engine)) == (0, 1))

    asyncio.run(check())


def test_tokens_behind_a_stop_string_are_not_delivered() -> None:
    async def check() -> None:
        async with running() as engine:
            outputs = await collect(engine, request(fake.BURST, stop=("w101",)))
        assert (text_of(outputs), tokens_of(outputs)) == ("w100 ", [100, 101])

    asyncio.run(check())


def test_a_stop_string_on_the_last_token_is_the_reason() -> None:
    async def check() -> None:
        async with running() as engine:
            output = (await collect(engine, request(stop=("w104",), include_stop_str_in_output=True)))[-1]
        assert (output.finish_reason, output.stop_reason, output.text) == (FinishReason.STOP, "w104", "w104")

    asyncio.run(check())


def test_text_held_for_a_stop_string_is_delivered_at_the_end() -> None:
    async def check() -> None:
        async with running() as engine:
            outputs = await collect(engine, request(stop=("w104 w105",)))
        assert (outputs[-1].text, outputs[-1].finish_reason) == ("w104 ", FinishReason.LENGTH)

    asyncio.run(check())


def test_a_stop_token_ends_the_stream_without_its_text() -> None:
    async def check() -> None:
        async with running() as engine:
            outputs = await collect(engine, request(stop_token_ids=(102,)))
            shown = await collect(engine, request(stop_token_ids=(102,), include_stop_str_in_output=True))
        assert (text_of(outputs), tokens_of(outputs)) == ("w100 w101 ", [100, 101, 102])
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, 102)
        assert text_of(shown) == "w100 w101 w102 "

    asyncio.run(check())


# Admission


def test_a_full_queue_refuses_at_once_until_a_request_ends() -> None:
    async def check() -> None:
        async with running(max_num_seqs=1, limits=AdmissionLimits(max_waiting=1)) as engine:
            tasks = [asyncio.create_task(collect(engine, request(fake.WAIT, name=f"r{i}"))) for i in range(2)]
            await eventually(lambda: engine.num_live == 2)
            with pytest.raises(OverloadedError) as refused:
                await collect(engine, request())
            assert refused.value.retry_after_s >= 1
            tasks[0].cancel()
            await asyncio.wait(tasks[:1])
            assert len(await collect(engine, request())) == 5
            tasks[1].cancel()
            await asyncio.wait(tasks)

    asyncio.run(check())


def test_a_request_longer_than_the_context_is_refused() -> None:
    async def check() -> None:
        async with running() as engine:
            with pytest.raises(ContextLengthError, match="maximum context length"):
                await collect(engine, request(max_tokens=4094))
            assert engine.num_live == 0

    asyncio.run(check())


def test_what_the_engine_refuses_is_the_requests_error() -> None:
    async def check() -> None:
        async with running() as engine:
            with pytest.raises(RequestError, match="refuses this prompt") as refused:
                await collect(engine, request(fake.REFUSE))
            assert (refused.value.param, engine.num_live) == ("prompt", 0)

    asyncio.run(check())


def test_before_the_start_nothing_is_served() -> None:
    async def check() -> None:
        engine = AsyncEngine(EngineConfig(model="fake"), command=COMMAND)
        assert not engine.is_ready and engine.last_stats is None
        for act in (lambda: engine.info, engine.check_health):
            with pytest.raises(EngineUnavailableError, match="loading"):
                act()
        assert isinstance(await error_of(collect(engine, request())), EngineUnavailableError)
        await engine.stop()

    asyncio.run(check())


def test_one_tenants_flood_leaves_places_for_another() -> None:
    async def check() -> None:
        async with running(max_num_seqs=1, limits=AdmissionLimits(max_waiting=4)) as engine:
            flood = [msgspec.structs.replace(request(fake.WAIT, name=f"r{i}"), tenant="a", share=0.5) for i in range(4)]
            tasks = [asyncio.create_task(collect(engine, each)) for each in flood]
            await eventually(lambda: engine.num_live == 4)
            with pytest.raises(OverloadedError):
                engine.check_admission(Tenant("a", 0.5))
            with pytest.raises(OverloadedError):
                await collect(engine, msgspec.structs.replace(request(), tenant="a", share=0.5))
            engine.check_admission(Tenant("b", 0.5))
            assert len(await collect(engine, msgspec.structs.replace(request(), tenant="b", share=0.5))) == 5
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    asyncio.run(check())


# What is observed


def test_steps_are_observed_with_what_they_computed_of_live_requests() -> None:
    class Watcher(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.shares: list[Sequence[StepShare]] = []

        def on_step(self, stats: StepStats, shares: Sequence[StepShare] = ()) -> None:
            self.shares.append(shares)

    async def check() -> None:
        watcher = Watcher()
        async with running(observer=watcher) as engine:
            await collect(engine, grouped(fake.PLAIN, "tenant", "mine", max_tokens=3))
            ended = len(watcher.shares)
            async with aclosing(engine.generate(grouped(fake.SLOW))) as stream:
                await anext(stream)
            await eventually(lambda: watcher.shares[-1] == ())  # the engine may not know yet that it has ended
        assert watcher.shares[:ended] == [(StepShare("tenant", "mine", 0, 3),)] * 3

    asyncio.run(check())


def test_every_request_is_observed_to_end_once() -> None:
    async def check() -> None:
        recorder = Recorder()
        async with running(observer=recorder) as engine:
            await collect(engine, request())
            await collect(engine, request(stop=("w101",)))
            await error_of(collect(engine, request(fake.FAIL)))
            async with aclosing(engine.generate(request(fake.SLOW))) as left:
                await anext(left)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(collect(engine, request(fake.WAIT)), 0.05)
        reasons = [reason for reason, _ in recorder.ends]
        assert reasons == [*"length stop error abort abort".split()]
        assert [timings is not None for _, timings in recorder.ends] == [True, True, True, True, False]
        assert (recorder.num_first, recorder.num_tokens) == (4, 5 + 2 + 1 + 1)
        assert [gap is None for gap in recorder.gaps[:7]] == [True, *[False] * 4, True, False]

    asyncio.run(check())


def test_the_last_output_ends_the_request_even_if_the_stream_is_not_read_on() -> None:
    async def check() -> None:
        async with running() as engine, aclosing(engine.generate(request(max_tokens=1))) as stream:
            await anext(stream)
            assert engine.num_live == 0

    asyncio.run(check())


@pytest.mark.parametrize(("device", "num_places"), [("cpu", 64 + 1), ("cuda", 256 + 1)])
def test_as_many_are_admitted_as_run_on_the_device(device: str, num_places: int) -> None:
    async def check() -> None:
        limits = AdmissionLimits(max_waiting=1)
        engine = AsyncEngine(EngineConfig(model="fake", device=device), command=COMMAND, limits=limits)
        await engine.start(Words())
        try:
            live = [engine._admit(request(fake.WAIT, name=str(number))) for number in range(num_places)]
            with pytest.raises(OverloadedError, match=f"All {num_places} places are taken"):
                engine._admit(request(fake.WAIT, name="late"))
            assert len(live) == num_places
        finally:
            await engine.stop()

    asyncio.run(check())
