"""AsyncEngine over a real child process with a fake engine in it: streams, aborts, failures, nothing left behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from engine.async_engine import AsyncEngine
from engine.client import GenerationRequest, NullObserver, Tenant
from engine.config import EngineConfig
from engine.errors import (
    ContextLengthError,
    EngineFailedError,
    EngineUnavailableError,
    ModelError,
    OverloadedError,
    RequestError,
    TwostepError,
)
from engine.outputs import RequestOutput
from engine.request import FinishReason
from engine.sampling_params import SamplingParams
from engine.stats import RequestTimings
from engine.waiting_room import RoomLimits
from tests.engine import fake_engine_process as fake

COMMAND = (sys.executable, str(fake.__file__))


class Words:
    """Token i is the word `wi` with a space behind it."""

    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return b"w%d " % token_id


class Recorder(NullObserver):
    """Remembers what it observed."""

    def __init__(self) -> None:
        self.num_first = self.num_tokens = 0
        self.gaps: list[float | None] = []
        self.ends: list[tuple[FinishReason, RequestTimings | None]] = []

    def on_first_token(self, timings: RequestTimings, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        self.num_first += 1

    def on_tokens(self, num_tokens: int, gap_s: float | None) -> None:
        self.num_tokens += num_tokens
        self.gaps.append(gap_s)

    def on_finish(self, reason: FinishReason, timings: RequestTimings | None) -> None:
        self.ends.append((reason, timings))


@asynccontextmanager
async def running(model: str = "fake", max_num_seqs: int = 64, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(EngineConfig(model=model, max_num_seqs=max_num_seqs), Words(), command=COMMAND, **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def request(command: int = fake.PLAIN, first: int = 100, name: str = "r", **params: Any) -> GenerationRequest:
    sampling = SamplingParams(**({"max_tokens": 5} | params))
    return GenerationRequest(
        request_id=name, prompt_token_ids=[first, 1, command], params=sampling, arrival_s=time.monotonic()
    )


async def collect(engine: AsyncEngine, wanted: GenerationRequest) -> list[RequestOutput]:
    return [output async for output in engine.generate(wanted)]


async def error_of(coroutine: Coroutine[Any, Any, object]) -> TwostepError | None:
    try:
        await coroutine
    except TwostepError as error:
        return error
    return None


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def aborts_of(engine: AsyncEngine) -> int:
    return engine.last_stats.num_requests if engine.last_stats else 0


def held_by(engine: AsyncEngine) -> int:
    return engine.last_stats.pool.held if engine.last_stats else 0


def children() -> set[int]:
    """Of this process, those that are engines: servers of other tests have children for other purposes."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile; another one gets its children.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pids.update(map(int, (task / "children").read_text().split()))
    return {pid for pid in pids if is_engine(pid)}


def is_engine(pid: int) -> bool:
    """Or a child that has ended and was not waited for, of which nothing else is known."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return command == b"" or COMMAND[1].encode() in command


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
        assert {(output.request_id, output.num_prompt_tokens, output.num_cached_tokens) for output in outputs} == {
            ("r", 3, 2)
        }

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
        assert (recorder.num_first, recorder.num_tokens) == (1, 0)
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


# Aborts


@pytest.mark.parametrize("num_outputs", [0, 1, 3])
def test_a_caller_that_leaves_frees_the_engine(num_outputs: int) -> None:
    async def check() -> None:
        async with running() as engine:
            stream = engine.generate(request(fake.SLOW if num_outputs else fake.WAIT, max_tokens=3000))
            for _ in range(num_outputs):
                await anext(stream)
            if num_outputs == 0:
                waiting = asyncio.ensure_future(anext(stream))
                await eventually(lambda: held_by(engine) == 1)
                waiting.cancel()
                await asyncio.wait((waiting,))
            await stream.aclose()
            assert engine.num_live == 0
            await eventually(lambda: (held_by(engine), aborts_of(engine)) == (0, 1))

    asyncio.run(check())


def test_a_cancelled_task_frees_the_engine() -> None:
    async def check() -> None:
        async with running() as engine:
            task = asyncio.create_task(collect(engine, request(fake.SLOW, max_tokens=3000)))
            await eventually(lambda: held_by(engine) == 1)
            task.cancel()
            await eventually(lambda: (held_by(engine), engine.num_live) == (0, 0))

    asyncio.run(check())


def test_callers_that_leave_together_are_one_message() -> None:
    async def check() -> None:
        async with running() as engine:
            tasks = [asyncio.create_task(collect(engine, request(fake.WAIT, name=f"r{i}"))) for i in range(30)]
            await eventually(lambda: held_by(engine) == 30)
            for task in tasks:
                task.cancel()
            await eventually(lambda: aborts_of(engine) == 30)
            assert engine.last_stats and engine.last_stats.prefix_queries == 1

    asyncio.run(check())


def test_what_the_engine_has_finished_is_not_aborted() -> None:
    async def check() -> None:
        async with running() as engine:
            async with aclosing(engine.generate(request())) as unread:
                await anext(unread)
                await asyncio.sleep(0.1)
            await collect(engine, request())
            assert engine.last_stats and engine.last_stats.prefix_queries == 0

    asyncio.run(check())


# The door


def test_a_full_room_refuses_at_once_until_someone_leaves() -> None:
    async def check() -> None:
        async with running(max_num_seqs=1, limits=RoomLimits(max_waiting=1)) as engine:
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
        engine = AsyncEngine(EngineConfig(model="fake"), Words(), command=COMMAND)
        assert not engine.is_ready and engine.last_stats is None
        for act in (lambda: engine.info, engine.check_health):
            with pytest.raises(EngineUnavailableError, match="loading"):
                act()
        assert isinstance(await error_of(collect(engine, request())), EngineUnavailableError)
        await engine.stop()

    asyncio.run(check())


# What is observed


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


def test_the_last_output_ends_the_request_even_if_nobody_reads_on() -> None:
    async def check() -> None:
        async with running() as engine, aclosing(engine.generate(request(max_tokens=1))) as stream:
            await anext(stream)
            assert engine.num_live == 0

    asyncio.run(check())


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
        ("broken", EngineUnavailableError, "a broken loader"),
        ("dies", EngineUnavailableError, "exit code 7.*last words"),
    ],
)
def test_a_start_that_fails_says_why(model: str, kind: type[TwostepError], message: str) -> None:
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


def test_an_engine_that_works_is_healthy_however_long() -> None:
    async def check() -> None:
        async with running(max_silence_s=1.5) as engine:
            assert len(await collect(engine, request(fake.SLOW, max_tokens=100))) == 100

    asyncio.run(check())


def test_a_pause_of_the_server_is_not_the_engines_silence() -> None:
    async def check() -> None:
        async with running(max_silence_s=1.0) as engine:
            task = asyncio.create_task(error_of(collect(engine, request(fake.HANG))))
            await eventually(lambda: engine.num_live == 1)
            time.sleep(2.0)
            paused_until_s = time.monotonic()
            assert isinstance(await task, EngineFailedError)
            assert time.monotonic() - paused_until_s > 0.9

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
    """Else it would not end with the engine."""

    async def check() -> None:
        async with running() as engine:
            process = engine._supervisor._process
            assert process is not None and process._link.engine_end.fileno() == -1

    asyncio.run(check())


def test_a_load_can_be_stopped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.incarnation._STOP_GRACE_S", 1000.0)

    async def check() -> None:
        engine = AsyncEngine(EngineConfig(model="slow"), Words(), command=COMMAND)
        start = asyncio.create_task(error_of(engine.start()))
        await eventually(lambda: len(children()) == 1)
        await asyncio.wait_for(engine.stop(), 20)
        assert isinstance(await start, EngineUnavailableError)
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
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(child, number)
            assert len(await collect(engine, request())) == 5
            assert children() == {child}  # and not another one in its place
        assert children() == set()

    asyncio.run(check())


@pytest.mark.parametrize("command", [fake.WAIT, fake.SLOW, fake.HANG])
def test_the_engine_ends_when_the_server_is_killed(command: int, tmp_path: Path) -> None:
    script = (
        "import asyncio, sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from tests.engine import test_async_engine as t\n"
        "async def main():\n"
        "    async with t.running() as engine:\n"
        "        asyncio.ensure_future(t.collect(engine, t.request(int(sys.argv[2]), max_tokens=4000)))\n"
        "        hangs = int(sys.argv[2]) == t.fake.HANG\n"
        "        await t.eventually(lambda: engine.num_live == 1 if hangs else t.held_by(engine) == 1)\n"
        "        print(*t.children(), flush=True)\n"
        "        time.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    arguments = [sys.executable, "-c", script, root, str(command)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        child = Path("/proc", server.stdout.readline().strip())
        assert child.exists()
        server.kill()
    asyncio.run(eventually(lambda: not child.exists() or "Z" in (child / "stat").read_text().split()[2]))
    assert list(tmp_path.iterdir()) == []


def test_one_tenants_flood_leaves_room_for_another() -> None:
    async def check() -> None:
        async with running(max_num_seqs=1, limits=RoomLimits(max_waiting=4)) as engine:
            flood = [replace(request(fake.WAIT, name=f"r{i}"), tenant="a", share=0.5) for i in range(4)]
            tasks = [asyncio.create_task(collect(engine, each)) for each in flood]
            await eventually(lambda: engine.num_live == 4)
            with pytest.raises(OverloadedError):
                engine.check_room(Tenant("a", 0.5))
            with pytest.raises(OverloadedError):
                await collect(engine, replace(request(), tenant="a", share=0.5))
            engine.check_room(Tenant("b", 0.5))
            assert len(await collect(engine, replace(request(), tenant="b", share=0.5))) == 5
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    asyncio.run(check())
