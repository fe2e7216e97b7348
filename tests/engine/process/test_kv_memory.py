"""The memory for the KV cache outlives an engine that was killed, and no other, and ends with the server."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.client.async_engine import AsyncEngine
from engine.process.kv_memory import KVMemory
from tests.engine import fake_engine_process as fake
from tests.engine.async_engines import children, collect, eventually, request, running
from tests.engine.process.restarts import is_down, kill_engine


def memory_of(engine: AsyncEngine) -> int:
    return engine._supervisor._kv_memory.fd


@pytest.mark.parametrize(
    ("how", "is_kept"), [(signal.SIGKILL, True), (signal.SIGSEGV, False), (signal.SIGABRT, False)], ids=str
)
def test_it_is_kept_where_the_engine_was_killed_and_emptied_where_it_crashed(how: int, is_kept: bool) -> None:
    async def check() -> None:
        async with running() as engine:
            os.pwrite(memory_of(engine), b"blocks", 0)
            kill_engine(how)
            await is_down(engine)
            await eventually(lambda: engine.is_ready)
            assert os.pread(memory_of(engine), 9, 0) == (b"blocks" if is_kept else b"")
            assert len(await collect(engine, request())) == 5

    asyncio.run(check())


def test_it_is_emptied_where_the_engine_failed_by_itself() -> None:
    async def check() -> None:
        async with running() as engine:
            os.pwrite(memory_of(engine), b"blocks", 0)
            await collect_refused(engine)
            assert os.pread(memory_of(engine), 9, 0) == b""

    asyncio.run(check())


async def collect_refused(engine: AsyncEngine) -> None:
    with pytest.raises(Exception, match="nothing else"):
        await collect(engine, request(fake.EXIT))


def test_it_is_emptied_where_an_engine_could_not_start_over_it(tmp_path: Path) -> None:
    """What it holds may be what the process lacked, or what it died of."""

    async def check() -> None:
        async with running(f"stumbles:{tmp_path}") as engine:
            os.pwrite(memory_of(engine), b"blocks", 0)
            kill_engine()
            await is_down(engine)
            await eventually(lambda: engine.is_ready)
            assert os.pread(memory_of(engine), 9, 0) == b""

    asyncio.run(check())


@pytest.mark.slow
def test_it_is_kept_where_the_next_engine_is_killed_once_while_it_loads_and_not_twice(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(f"waits:{tmp_path}") as engine:
            os.pwrite(memory_of(engine), b"blocks", 0)
            kill_engine()
            for number, content in ((2, b"blocks"), (3, b"")):
                await eventually(lambda number=number: len(list(tmp_path.iterdir())) == number)  # type: ignore[misc]
                kill_engine()
                await eventually(lambda content=content: os.pread(memory_of(engine), 9, 0) == content)  # type: ignore[misc]

    asyncio.run(check())


def num_memories() -> int:
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found += "twostep-kv" in os.readlink(fd)
        except FileNotFoundError:
            continue
    return found


def test_nothing_of_it_is_left_when_the_engine_is_stopped() -> None:
    before = num_memories()

    async def check() -> None:
        async with running():
            assert num_memories() == before + 1 and len(children()) == 1

    asyncio.run(check())
    assert num_memories() == before


def test_closing_twice_is_closing_once() -> None:
    memory = KVMemory()
    memory.close()
    memory.close()
    assert memory.fd == -1


def test_it_takes_no_place_among_files() -> None:
    """Not in /dev/shm either, which containers limit to 64 MB."""
    script = (
        "import os; from engine.process.kv_memory import KVMemory; memory = KVMemory();"
        "os.ftruncate(memory.fd, 1 << 40); print(os.readlink(f'/proc/self/fd/{memory.fd}'))"
    )
    name = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert name == "/memfd:twostep-kv (deleted)\n"
