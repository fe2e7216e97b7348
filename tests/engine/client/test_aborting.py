"""A group of requests is ended from outside, whatever it does, and leaves nothing behind."""

import asyncio
from contextlib import aclosing

import pytest

from engine.core.errors import RequestAbortedError
from engine.core.request import FinishReason
from tests.engine import fake_engine_process as fake
from tests.engine.async_engines import Recorder, assert_free, collect, eventually, grouped, running, text_of


def test_with_tokens_it_ends_with_those() -> None:
    async def check() -> None:
        recorder = Recorder()
        async with running(observer=recorder) as engine, aclosing(engine.generate(grouped(fake.SLOW))) as stream:
            outputs = [await anext(stream)]
            assert engine.abort("", "g")
            outputs += [output async for output in stream]
            await assert_free(engine)
        last = outputs[-1]
        assert (last.finish_reason, last.stop_reason, last.token_ids) == (FinishReason.LENGTH, "abort", ())
        assert text_of(outputs) == "".join(f"w{100 + i} " for i in range(last.num_output_tokens)) != ""
        assert [reason for reason, _ in recorder.ends] == [FinishReason.ABORT]

    asyncio.run(check())


@pytest.mark.parametrize("command", [fake.WAIT, fake.PREFILL])
def test_without_a_token_it_ends_with_an_error(command: int) -> None:
    async def check() -> None:
        recorder = Recorder()
        async with running(observer=recorder) as engine:
            waiting = asyncio.create_task(collect(engine, grouped(command)))
            await eventually(lambda: engine.last_stats is not None)
            assert engine.abort("", "g")
            with pytest.raises(RequestAbortedError):
                await waiting
            await assert_free(engine)
        assert recorder.ends == [(FinishReason.ABORT, None)]

    asyncio.run(check())


def test_text_that_was_held_back_is_delivered() -> None:
    async def check() -> None:
        stop = " ".join(f"w{100 + i}" for i in range(500))
        async with running() as engine, aclosing(engine.generate(grouped(fake.SLOW, stop=(stop,)))) as stream:
            assert (await anext(stream)).text == ""
            engine.abort("", "g")
            assert [output.text async for output in stream][-1].startswith("w100 ")

    asyncio.run(check())


def test_everything_is_free_although_the_stream_is_not_read() -> None:
    async def check() -> None:
        async with running() as engine, aclosing(engine.generate(grouped(fake.SLOW))) as stalled:
            await anext(stalled)
            assert engine.abort("", "g") and not engine.abort("", "g")
            await assert_free(engine)
            assert [output async for output in stalled][-1].stop_reason == "abort"

    asyncio.run(check())


def test_no_other_requests_end() -> None:
    async def check() -> None:
        others = [grouped(fake.SLOW, max_tokens=9, tenant=tenant) for tenant in ("", "bob")]
        others.append(grouped(fake.SLOW, max_tokens=9, tenant="alice", client_request_id="h"))
        async with running() as engine:
            own = asyncio.create_task(collect(engine, grouped(fake.SLOW, tenant="alice")))
            going_on = [asyncio.create_task(collect(engine, other)) for other in others]
            await eventually(lambda: engine.num_live == 4)
            assert engine.abort("alice", "g") and not engine.abort("alice", "unknown")
            with pytest.raises(RequestAbortedError):
                await own
            assert [len(await each) for each in going_on] == [9, 9, 9]

    asyncio.run(check())


def test_what_has_all_its_tokens_has_ended_already() -> None:
    async def check() -> None:
        async with running() as engine, aclosing(engine.generate(grouped(fake.PLAIN, max_tokens=3))) as stalled:
            await anext(stalled)
            (live,) = engine._registry
            await eventually(lambda: live.is_complete)
            assert not engine.abort("", "g")
            assert [output.finish_reason async for output in stalled][-1] is FinishReason.LENGTH

    asyncio.run(check())
