"""Processes and their CPU time, as /proc tells them."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Member:
    """A process. The time of its start tells it from a later one with the same number."""

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
    """None of a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # from the third on: a name may hold spaces and parentheses
    cpu_s = sum(map(int, fields[11:15])) / TICKS_PER_S
    return _Status(Member(pid, int(fields[19])), int(fields[1]), int(fields[3]), fields[0], cpu_s)


def family_of(pid: int) -> set[Member]:
    """The process, all that descend from it, and all of its session. Not those that left both."""
    everyone = [found for path in Path("/proc").glob("[0-9]*") if (found := _status(int(path.name))) is not None]
    family = {status.member.pid for status in everyone if status.member.pid == pid or status.session == pid}
    while grown := {status.member.pid for status in everyone if status.parent in family} - family:
        family |= grown
    return {status.member for status in everyone if status.member.pid in family}


def is_running(member: Member) -> bool:
    """Not of a process that has ended and waits for its parent to notice."""
    status = _status(member.pid)
    return status is not None and status.member == member and status.state != "Z"


def cpu_s_of(family: Iterable[Member]) -> float:
    """What they and their children have used so far. Never falls while the first of the family lives."""
    found = (_status(member.pid) for member in family)
    return sum(status.cpu_s for status in found if status is not None)
