"""Compared servers end with all processes that they started: after their turn, after a crash, and at a signal."""

import asyncio
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import processes
from benchmarks.peers.family import Member, family_of
from benchmarks.peers.plan import ServerPlan
from tests.benchmarks.comparisons import Bench, Capture, has_ended, when

pytestmark = pytest.mark.slow  # servers are started, and waited for


def test_processes_in_sessions_of_their_own_end_with_their_server(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="parent")
    assert bench.run("--rounds", "1", "--scenario", "S1") == 0
    assert len(bench.pids("a")) == 2
    assert all(map(has_ended, bench.pids("a")))


def test_children_of_a_server_that_crashed_end_too(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="parent dies")
    assert bench.run("--rounds", "1") == 1
    assert len(bench.pids("a")) == 2
    assert all(map(has_ended, bench.pids("a")))


def test_children_of_a_server_that_never_started_end_too(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys)
    bench.add(f'[[server]]\nname = "a"\ncommand = "sh -c \'sleep 3600 & echo started $$! > {tmp_path}/a; exit 3\'"\n')
    assert bench.run("--rounds", "1") == 1
    assert all(map(has_ended, bench.pids("a"))) and len(bench.pids("a")) == 1


def test_a_foreign_process_with_the_pid_of_a_server_that_ended_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signalled: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, _: signalled.append(pid))

    async def use(foreign: subprocess.Popen[bytes]) -> None:
        foreign_family = family_of(foreign.pid)
        async with processes.running(ServerPlan("a", "true"), tmp_path / "log") as server:
            await server.ended()
            monkeypatch.setattr(processes, "family_of", lambda pid: {Member(pid, 1), *foreign_family})

    with subprocess.Popen(["sleep", "3600"]) as foreign:
        try:
            asyncio.run(use(foreign))
            assert foreign.poll() is None and signalled == []
        finally:
            foreign.kill()


def test_a_server_is_asked_to_end_before_it_is_killed(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    bench = Bench(tmp_path, capsys, a="stubborn")
    assert bench.run("--rounds", "1", "--scenario", "S1") == 0
    assert bench.notes("a").count("asked to end") == 1
    assert re.findall(r"(\w) *: ending", bench.err) == ["a"]
    assert all(map(has_ended, bench.pids("a")))


def test_a_server_has_time_to_clean_up(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ORPHANS_GRACE_S", 0.0)
    bench = Bench(tmp_path, capsys, a="tidy")
    assert bench.run("--rounds", "1", "--scenario", "S1") == 0
    assert "cleaned up" in bench.notes("a")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_server_and_keeps_what_was_measured(
    number: signal.Signals, tmp_path: Path, capsys: Capture
) -> None:
    bench = Bench(tmp_path, capsys, a="", b="parent hangs")
    when(lambda: "prompt" in bench.notes("b"), lambda: os.kill(os.getpid(), number))
    assert bench.run("--rounds", "1", "--scenario", "S1") == 130
    assert all(map(has_ended, bench.pids("b"))) and len(bench.pids("b")) == 2
    assert not bench.document["is_complete"]
    assert bench.runs("a")[1, "S1"]["problem"] == ""
    assert bench.runs("b") == {}


def test_an_interrupt_while_a_server_starts_ends_it(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys)
    bench.add(f'[[server]]\nname = "deaf"\ncommand = "sh -c \'echo started $$$$ > {tmp_path}/deaf; sleep 60\'"\n')
    when(lambda: bench.pids("deaf"), lambda: os.kill(os.getpid(), signal.SIGINT))
    assert bench.run("--rounds", "1") == 130
    assert all(map(has_ended, bench.pids("deaf")))


def test_an_interrupt_before_the_start_has_returned_ends_what_has_started(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = asyncio.create_subprocess_exec, []

    async def slow_start(*command: str, **options: Any) -> asyncio.subprocess.Process:
        started.append(await start(*command, **options))
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.1)
        return started[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow_start)
    assert Bench(tmp_path, capsys, a="").run("--rounds", "1") == 130
    assert started[0].returncode is not None


def test_an_interrupt_is_kept_where_the_start_fails_after_it(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    async def fail_late(*command: str, **_: Any) -> asyncio.subprocess.Process:
        started.append(command)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.1)
        raise OSError("too late")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail_late)
    assert Bench(tmp_path, capsys, a="", b="").run("--rounds", "1") == 130
    assert len(started) == 1


def test_a_second_interrupt_does_not_wait_for_a_stubborn_server(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="stubborn hangs")
    when(lambda: "prompt" in bench.notes("a"), lambda: os.kill(os.getpid(), signal.SIGINT))
    when(lambda: "asked to end" in bench.notes("a"), lambda: os.kill(os.getpid(), signal.SIGINT))
    assert bench.run("--rounds", "1", "--scenario", "S1") == 130
    assert all(map(has_ended, bench.pids("a")))
