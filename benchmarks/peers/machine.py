"""Describes the machine, and measures how much of its CPU time foreign processes take during a run."""

import asyncio
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.family import TICKS_PER_S, Member, cpu_s_of

NUM_CPUS = os.cpu_count() or 1
_IDLE = (3, 4)  # idle and iowait, in the line of /proc/stat


def description() -> dict[str, Any]:
    """Returns the machine's CPU, memory, kernel and Python, for the document."""
    memory = Path("/proc/meminfo").read_text().split()[1]
    models = {
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    return {
        "cpu": ", ".join(sorted(models)) or platform.machine(),
        "num_cpus": NUM_CPUS,
        "memory_gib": round(int(memory) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _busy_s() -> float:
    """Returns the machine's CPU time since boot that was not idle, with the time that a hypervisor stole."""
    times = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(times) - sum(times[i] for i in _IDLE)) / TICKS_PER_S


class ForeignCpu:
    """The CPU time, since this object was made, that neither this process nor a server's processes used."""

    def __init__(self, family: Callable[[], set[Member]] = set) -> None:
        self._family = family
        self._began_s = time.monotonic()
        self._began_busy_s, self._began_own_s = _busy_s(), self._own_s()

    def share(self) -> float:
        """The foreign share of the CPU time of all cores so far, 0 to 1."""
        cpu_s = (time.monotonic() - self._began_s) * NUM_CPUS
        foreign_s = (_busy_s() - self._began_busy_s) - (self._own_s() - self._began_own_s)
        return min(1.0, max(0.0, foreign_s / cpu_s)) if cpu_s else 0.0

    def _own_s(self) -> float:
        return time.process_time() + cpu_s_of(self._family())


async def foreign_share(seconds: float) -> float:
    """Measures the foreign share while no server runs."""
    foreign = ForeignCpu()
    await asyncio.sleep(seconds)
    return foreign.share()
