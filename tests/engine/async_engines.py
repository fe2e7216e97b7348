"""AsyncEngine over a real child process with a fake engine in it, and helpers that inspect both."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from engine.client.async_engine import AsyncEngine
from engine.client.observer import NullObserver
from engine.core.config import EngineConfig
from engine.core.errors import TwostepError
from engine.core.generation_request import GenerationRequest
from engine.core.outputs import RequestOutput
from engine.core.request import FinishReason
from engine.core.sampling_params import SamplingParams
from engine.core.stats import RequestTimings
from tests.engine import fake_engine_process as fake

COMMAND = (sys.executable, str(fake.__file__))


class Words:
    """A token table in which token i is the word `wi` with a space behind it."""

    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return b"w%d " % token_id


class Recorder(NullObserver):
    """An observer that remembers what it observed."""

    def __init__(self) -> None:
        self.num_prompt_tokens = self.num_first = self.num_tokens = 0
        self.gaps: list[float | None] = []
        self.ends: list[tuple[FinishReason, RequestTimings | None]] = []

    def on_prompt(self, timings: RequestTimings, num_tokens: int) -> None:
        self.num_prompt_tokens += num_tokens

    def on_first_token(self, ttft_s: float) -> None:
        self.num_first += 1

    def on_tokens(self, num_tokens: int, gap_s: float | None) -> None:
        self.num_tokens += num_tokens
        self.gaps.append(gap_s)

    def on_finish(self, reason: FinishReason, timings: RequestTimings | None) -> None:
        self.ends.append((reason, timings))


@asynccontextmanager
async def running(model: str = "fake", max_num_seqs: int = 64, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(EngineConfig(model=model, max_num_seqs=max_num_seqs), command=COMMAND, **options)
    await engine.start(Words())
    try:
        yield engine
    finally:
        await engine.stop()


def request(command: int = fake.PLAIN, first: int = 100, name: str = "r", **params: Any) -> GenerationRequest:
    sampling = SamplingParams(**({"max_tokens": 5} | params))
    return GenerationRequest(
        client_request_id=name, prompt_token_ids=[first, 1, command], params=sampling, arrival_s=time.monotonic()
    )


def grouped(command: int, tenant: str = "", client_request_id: str = "g", **params: Any) -> GenerationRequest:
    params = {"max_tokens": 3000, **params}
    return msgspec.structs.replace(request(command, **params), tenant=tenant, client_request_id=client_request_id)


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


async def assert_free(engine: AsyncEngine) -> None:
    await eventually(lambda: (held_by(engine), aborts_of(engine)) == (0, 1))
    assert (engine.num_live, engine.queue_stats.num_in_flight, engine.queue_stats.num_waiting_tokens) == (0, 0, 0)


def children() -> set[int]:
    """Returns this process's children that are engines: servers of other tests have children for other purposes."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile; another one gets its children.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pids.update(map(int, (task / "children").read_text().split()))
    return {pid for pid in pids if is_engine(pid)}


def is_engine(pid: int) -> bool:
    """Returns whether a child is an engine, or has ended and was not waited for: then its command is unknown."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return command == b"" or COMMAND[1].encode() in command or b"engine.process" in command


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
