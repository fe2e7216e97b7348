"""A child process ends together with the processes that it started, however it ends."""

import asyncio

import pytest

from engine.process.child_process import ChildProcess
from tests.engine.async_engines import eventually

LEAVES_A_PROCESS = "sleep 60 & echo $!; "


@pytest.mark.parametrize("end", ["exit 3", "kill -SEGV $$", "sleep 60"])
def test_nothing_that_it_started_outlives_it(end: str) -> None:
    async def check() -> None:
        child = await ChildProcess.start(["sh", "-c", LEAVES_A_PROCESS + end], on_exit=lambda: None)
        await eventually(lambda: bool(child.output_tail))
        orphan = int(child.output_tail)
        await child.stop(0.5)
        await eventually(lambda: not is_alive(orphan))

    asyncio.run(check())


def is_alive(pid: int) -> bool:
    """Returns whether the process runs: one that ended may stay as a zombie where nothing reaps orphans."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("exit 3", "exit code 3"),
        ("kill -KILL $$", "signal 9, Killed; out of memory?"),
        ("kill -BUS $$", "signal 7, Bus error; was a file that it reads cut short, or did a disk fail?"),
    ],
)
def test_it_reports_how_it_ended(end: str, told: str) -> None:
    async def check() -> str:
        child = await ChildProcess.start(["sh", "-c", end], on_exit=lambda: None)
        await child.stop(5.0)
        return child.how_it_ended

    assert asyncio.run(check()) == told
