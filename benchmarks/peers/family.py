"""Families of processes (a server with all that it started) and their CPU time, read from /proc."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Member:
    """A process. Its start time distinguishes it from a later process with the same pid."""

    pid: int
    started: int  # clock ticks after boot


@dataclass(frozen=True, slots=True)
class _Status:
    member: Member
    parent: int
    session: int
    state: str
    cpu_s: float  # with that of the children it has waited for


def _status(pid: int) -> _Status | None:
    """Reads a process's status; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # from the third on: a name may hold spaces and parentheses
    cpu_s = sum(map(int, fields[11:15])) / TICKS_PER_S
    return _Status(Member(pid, int(fields[19])), int(fields[1]), int(fields[3]), fields[0], cpu_s)


def family_of(pid: int) -> set[Member]:
    """Returns the process, its descendants, and all processes of its session; none that has left both."""
    processes = [found for path in Path("/proc").glob("[0-9]*") if (found := _status(int(path.name))) is not None]
    family = {status.member.pid for status in processes if status.member.pid == pid or status.session == pid}
    while grown := {status.member.pid for status in processes if status.parent in family} - family:
        family |= grown
    return {status.member for status in processes if status.member.pid in family}


def is_running(member: Member) -> bool:
    """Whether the process runs: a zombie, whose parent has not waited for it yet, does not."""
    status = _status(member.pid)
    return status is not None and status.member == member and status.state != "Z"


def cpu_s_of(family: Iterable[Member]) -> float:
    """Returns the CPU time of these processes and of children that they have waited for.

    It never falls while the family's first process lives.
    """
    found = (_status(member.pid) for member in family)
    return sum(status.cpu_s for status in found if status is not None)
