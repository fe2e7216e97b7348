"""Families of processes, their CPU time, and the share of the CPU that foreign processes take."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from benchmarks.peers import machine
from benchmarks.peers.family import Member, cpu_s_of, family_of, is_running
from benchmarks.peers.machine import ForeignCpu, description

BUSY = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True); input()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}], start_new_session=True)"


@contextmanager
def process(script: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a Python process, waits for its first line of output, and sends it a line to end it."""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as started:
        assert started.stdout is not None and started.stdin is not None
        started.stdout.readline()
        yield started
        started.stdin.write("\n")


def test_a_family_has_those_that_left_the_session_and_their_cpu_time() -> None:
    with process(PARENT) as parent:
        family = family_of(parent.pid)
        assert len(family) == 2
        assert parent.pid in {member.pid for member in family}
        assert cpu_s_of(family) >= 0.2
        assert all(map(is_running, family))


def test_the_cpu_time_of_a_child_is_not_lost_with_it() -> None:
    with process(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}], input='', text=True)\n"
                 "print(); input()") as parent:  # fmt: skip
        assert cpu_s_of(family_of(parent.pid)) >= 0.2


def test_a_zombie_is_no_longer_running_nor_is_another_process_with_its_number() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    (member,) = family_of(ended.pid)
    while is_running(member):
        time.sleep(0.01)
    ended.wait()
    assert not is_running(member)
    with process(BUSY) as live:
        (member,) = family_of(live.pid)
        assert is_running(member)
        assert not is_running(Member(live.pid, member.started + 1))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Fakes the clocks and CPU times that `machine` reads: 2 CPUs, none of them busy."""
    clock = SimpleNamespace(now_s=0.0, busy_s=0.0, client_s=0.0, server_s=0.0)
    times = SimpleNamespace(monotonic=lambda: clock.now_s, process_time=lambda: clock.client_s)
    monkeypatch.setattr(machine, "time", times)
    monkeypatch.setattr(machine, "NUM_CPUS", 2)
    monkeypatch.setattr(machine, "_busy_s", lambda: clock.busy_s)
    monkeypatch.setattr(machine, "cpu_s_of", lambda _: clock.server_s)
    return clock


def test_foreign_is_what_neither_the_client_nor_the_server_used(clock: SimpleNamespace) -> None:
    clock.busy_s, clock.client_s, clock.server_s = 100.0, 3.0, 40.0
    foreign = ForeignCpu()
    clock.now_s, clock.busy_s, clock.client_s, clock.server_s = 10.0, 110.0, 4.0, 44.0
    assert foreign.share() == 0.25


def test_a_share_is_between_nothing_and_all(clock: SimpleNamespace) -> None:
    foreign = ForeignCpu()
    assert foreign.share() == 0.0
    clock.now_s, clock.server_s = 1.0, 1.9
    assert foreign.share() == 0.0
    clock.busy_s, clock.server_s = 9.0, 0.0
    assert foreign.share() == 1.0


def test_stolen_time_is_busy_and_iowait_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "cpu  100 10 20 9000 800 3 2 65 7 0\ncpu0 1 1\n"
    monkeypatch.setattr(machine, "Path", lambda _: SimpleNamespace(read_text=lambda: line))
    monkeypatch.setattr(machine, "TICKS_PER_S", 100)
    assert machine._busy_s() == 2.0


def test_the_machine_is_described() -> None:
    described = description()
    assert described["num_cpus"] >= 1 and described["memory_gib"] > 0 and described["cpu"]
