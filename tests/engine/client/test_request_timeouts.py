"""A request ends when its own limits say so, with what there is, and leaves nothing behind."""

import asyncio
import gc
import time
from contextlib import aclosing

import msgspec
import pytest

from engine.client.admission import AdmissionLimits
from engine.client.live_request import LiveRequest
from engine.client.request_timeouts import RequestTimeouts
from engine.core.errors import OverloadedError, RequestTimeoutError
from engine.core.generation_request import GenerationRequest
from engine.core.request import FinishReason
from tests.engine import fake_engine_process as fake
from tests.engine.async_engines import (
    Recorder,
    aborts_of,
    assert_free,
    collect,
    eventually,
    held_by,
    request,
    running,
    text_of,
)


def limited(
    command: int, max_queue_s: float | None = None, deadline_s: float | None = None, max_tokens: int = 3000
) -> GenerationRequest:
    return msgspec.structs.replace(
        request(command, max_tokens=max_tokens), max_queue_s=max_queue_s, deadline_s=deadline_s
    )


def sibling(wanted: GenerationRequest) -> GenerationRequest:
    return msgspec.structs.replace(wanted, is_sibling=True)


@pytest.mark.parametrize(
    ("wanted", "limits", "why", "is_own"),
    [
        (limited(fake.WAIT, max_queue_s=0.05), AdmissionLimits(), "to be scheduled", True),
        (limited(fake.WAIT, max_queue_s=0.05), AdmissionLimits(max_queue_s=0.05), "to be scheduled", True),
        (limited(fake.WAIT, max_queue_s=50.0), AdmissionLimits(max_queue_s=0.05), "to be scheduled", False),
        (limited(fake.WAIT, deadline_s=50.0), AdmissionLimits(max_queue_s=0.05), "to be scheduled", False),
        (limited(fake.WAIT), AdmissionLimits(max_queue_s=0.05), "to be scheduled", False),
        (limited(fake.WAIT, deadline_s=0.05), AdmissionLimits(), "deadline", True),
        (limited(fake.PREFILL, max_queue_s=0.2, deadline_s=1.0), AdmissionLimits(), "deadline", True),
        (
            sibling(limited(fake.WAIT, max_queue_s=0.05, deadline_s=0.3)),
            AdmissionLimits(max_queue_s=0.05),
            "deadline",
            True,
        ),
    ],
)
def test_without_a_token_it_ends_with_an_error_that_names_the_limit(
    wanted: GenerationRequest, limits: AdmissionLimits, why: str, is_own: bool
) -> None:
    async def check() -> None:
        recorder = Recorder()
        async with running(limits=limits, observer=recorder) as engine:
            now = msgspec.structs.replace(wanted, arrival_s=request().arrival_s)
            with pytest.raises(RequestTimeoutError, match=why) as end:
                await collect(engine, now)
            assert end.value.is_own_limit is is_own
            await assert_free(engine)
        assert recorder.ends == [(FinishReason.ABORT, None)]

    asyncio.run(check())


def test_a_request_that_ended_is_freed_without_the_garbage_collector() -> None:
    def num_kept() -> int:
        return sum(type(each) in (LiveRequest, RequestTimeouts) for each in gc.get_objects())

    async def check() -> None:
        before = num_kept()  # of other tests
        async with running() as engine:
            await collect(engine, limited(fake.PLAIN, max_queue_s=5.0, deadline_s=5.0))
            assert num_kept() == before

    gc.collect()
    gc.disable()
    try:
        asyncio.run(check())
    finally:
        gc.enable()


def test_the_time_of_the_first_step_is_not_time_in_the_queue() -> None:
    async def check() -> None:
        async with running() as engine:
            assert len(await collect(engine, limited(fake.LONG, max_queue_s=0.25, max_tokens=3))) == 3

    asyncio.run(check())


@pytest.mark.parametrize(("max_queue_s", "deadline_s"), [(0.01, None), (None, 0.01)])
def test_a_request_that_would_wait_in_vain_is_refused(max_queue_s: float | None, deadline_s: float | None) -> None:
    async def check() -> None:
        async with running(max_num_seqs=1) as engine:
            waiting = asyncio.create_task(collect(engine, request(fake.WAIT)))
            await eventually(lambda: engine.queue_stats.predicted_wait_s > 0.01)
            with pytest.raises(OverloadedError, match="would wait"):
                await collect(
                    engine, msgspec.structs.replace(request(), max_queue_s=max_queue_s, deadline_s=deadline_s)
                )
            waiting.cancel()
            await asyncio.wait([waiting])

    asyncio.run(check())


def test_a_request_that_would_wait_for_its_siblings_only_is_admitted() -> None:
    async def check() -> None:
        async with running(max_num_seqs=1) as engine:
            waiting = asyncio.create_task(collect(engine, request(fake.WAIT)))
            await eventually(lambda: engine.queue_stats.predicted_wait_s > 0.01)
            assert len(await collect(engine, sibling(limited(fake.PLAIN, max_queue_s=0.01, max_tokens=3)))) == 3
            waiting.cancel()
            await asyncio.wait([waiting])

    asyncio.run(check())


def test_with_tokens_it_ends_with_those() -> None:
    async def check() -> None:
        recorder = Recorder()
        async with running(observer=recorder) as engine:
            outputs = await collect(engine, limited(fake.SLOW, max_queue_s=0.2, deadline_s=0.5))
            await assert_free(engine)
        *before, last = outputs
        assert all(output.finish_reason is None and len(output.token_ids) == 1 for output in before)
        assert (last.finish_reason, last.stop_reason, last.token_ids) == (FinishReason.LENGTH, "deadline", ())
        assert text_of(outputs) == "".join(f"w{100 + i} " for i in range(len(before))) != ""
        assert last.timings is not None and len(last.timings.inter_token_s) == len(before) - 1
        assert [reason for reason, _ in recorder.ends] == [FinishReason.LENGTH]

    asyncio.run(check())


def test_text_that_was_held_back_is_delivered_at_the_deadline() -> None:
    async def check() -> None:
        async with running() as engine:
            stop = " ".join(f"w{100 + i}" for i in range(500))
            wanted = msgspec.structs.replace(request(fake.SLOW, max_tokens=3000, stop=(stop,)), deadline_s=0.4)
            outputs = await collect(engine, wanted)
        assert [output.text for output in outputs[:-1]] == [""] * (len(outputs) - 1)
        assert outputs[-1].text.startswith("w100 w101 ")

    asyncio.run(check())


def test_the_engine_is_freed_although_the_stream_is_not_read() -> None:
    async def check() -> None:
        async with running() as engine, aclosing(engine.generate(limited(fake.SLOW, deadline_s=0.4))) as stalled:
            await anext(stalled)
            await eventually(lambda: (held_by(engine), aborts_of(engine)) == (0, 1))
            assert [output async for output in stalled][-1].stop_reason == "deadline"

    asyncio.run(check())


def test_what_ended_before_its_deadline_is_not_ended_again() -> None:
    async def check() -> None:
        async with running() as engine:
            stream = engine.generate(limited(fake.PLAIN, max_queue_s=1.0, deadline_s=1.0, max_tokens=3))
            await anext(stream)
            await asyncio.sleep(1.1)
            assert [output.finish_reason async for output in stream] == [None, FinishReason.LENGTH]
            await collect(engine, request())
            assert aborts_of(engine) == 0

    asyncio.run(check())


def test_timers_end_with_their_request() -> None:
    async def check() -> None:
        async with running() as engine:
            await collect(engine, limited(fake.PLAIN, deadline_s=1000.0, max_tokens=3))
            loop = asyncio.get_running_loop()
            timers = [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
            assert engine.num_live == 0 and all(timer.when() - loop.time() < 500 for timer in timers)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("max_queue_s", "deadline_s", "patience_s"),
    [(None, None, None), (30, None, 30), (None, 50, 40), (30, 50, 30), (45, 50, 40), (45, 5, 0)],
)
def test_no_one_waits_in_vain(max_queue_s: float | None, deadline_s: float | None, patience_s: float | None) -> None:
    wanted = msgspec.structs.replace(limited(fake.PLAIN, max_queue_s, deadline_s), arrival_s=time.monotonic() - 10)
    assert wanted.patience_s == (None if patience_s is None else pytest.approx(patience_s, abs=1.0))


@pytest.mark.parametrize(("limit_s", "max_queue_s", "patience_s"), [(50, None, 40), (50, 30, 30), (5, None, 0)])
def test_one_that_must_not_come_late_is_not_let_in_to_wait_for_longer(
    limit_s: float, max_queue_s: float | None, patience_s: float
) -> None:
    request = limited(fake.PLAIN, max_queue_s)
    wanted = msgspec.structs.replace(request, ttft_limit_s=limit_s, arrival_s=time.monotonic() - 10)
    assert wanted.patience_s == pytest.approx(patience_s, abs=1.0) and wanted.left_s is None


def test_a_request_that_waits_again_has_its_queue_timeout_again() -> None:
    async def check() -> None:
        ends: list[str] = []
        timeouts = RequestTimeouts(request(), 0.02, lambda: ends.append("late"), lambda: ends.append("deadline"))
        timeouts.on_scheduled()
        await asyncio.sleep(0.05)
        assert ends == []
        timeouts.on_unscheduled()
        await eventually(lambda: ends == ["late"])

    asyncio.run(check())


def test_a_sibling_that_waits_again_has_no_limit_either() -> None:
    async def check() -> None:
        ends: list[str] = []
        timeouts = RequestTimeouts(
            sibling(request()), 0.02, lambda: ends.append("late"), lambda: ends.append("deadline")
        )
        timeouts.on_scheduled()
        timeouts.on_unscheduled()
        await asyncio.sleep(0.05)
        assert ends == []

    asyncio.run(check())
