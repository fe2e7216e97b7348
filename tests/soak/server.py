"""A real server process for tests and soak runs: started, signalled and looked into from outside."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.resident_memory import resident_bytes

ROOT = Path(__file__).resolve().parents[2]
SETTLE_S = 60.0  # generous: the machine may be busy; what is tested is that it settles at all


@dataclass(frozen=True)
class ServerProcess:
    """A server process, which leads a process group of its own, so that signals to the group reach no other process."""

    process: "subprocess.Popen[str]"
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def engine_pids(self) -> list[int]:
        """The process ids of the engine and then of the one that waits for its death, as far as they are there."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if _runs(child, "engine.process")]

    @property
    def engine_pid(self) -> int | None:
        """The engine's process id; None while there is no engine process."""
        return next(iter(self.engine_pids), None)

    @property
    def rank_pids(self) -> list[int]:
        """The process ids of the engine's other ranks."""
        pid = self.engine_pid
        if pid is None:
            return []
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return [int(child) for child in children if _runs(child, "engine.ranks")]
        return []

    def kill_engine(self) -> None:
        """Kills the engine, and not the process that waits to be the next one."""
        pid = self.engine_pid
        assert pid is not None, "there is no engine"
        os.kill(pid, SIGKILL)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def signal_all(self, number: int) -> None:
        """Signals the server and its engine, whatever their groups, as a service manager does."""
        for pid in (self.engine_pid, self.process.pid):
            if pid is not None:
                os.kill(pid, number)

    def stop(self, number: int = SIGTERM) -> int:
        """Signals the server, waits for its end and returns the exit code."""
        self.signal(number)
        return self.wait()

    def wait(self) -> int:
        """Waits for the server's end and returns the exit code."""
        self.process.communicate(timeout=SETTLE_S)
        return self.process.returncode

    def complete(self, **fields: Any) -> dict[str, Any]:
        """Returns the body of /v1/completions, whose status must be 200."""
        answer = httpx.post(f"{self.url}/v1/completions", json=fields, timeout=300)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def metrics(self) -> dict[str, float]:
        """Returns every sample by its name, which includes its labels, as in `kv_blocks{state=held}`."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {_name(sample.name, sample.labels): sample.value for sample in samples}

    def is_idle(self) -> bool:
        now = self.metrics()
        busy = ("twostep_requests_running", "twostep_requests_waiting", "twostep_kv_blocks{state=held}")
        return all(now[name] == 0 for name in busy)

    def num_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def memory_bytes(self) -> int:
        """Resident memory of the server process."""
        return resident_bytes(self.process.pid)


def _runs(pid: str, module: str) -> bool:
    try:
        return module in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False  # it has ended


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of all the process's threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_cpu_seconds() -> float:
    """Returns the CPU time of all programs so far, steal time (taken by other virtual machines) included."""
    fields = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]  # user nice system idle iowait irq softirq steal
    return (sum(map(int, fields)) - int(fields[3]) - int(fields[4])) / os.sysconf("SC_CLK_TCK")


def _name(name: str, labels: dict[str, str]) -> str:
    return name + "{" + ",".join(f"{key}={value}" for key, value in sorted(labels.items())) + "}" if labels else name


@contextmanager
def running_server(*flags: str) -> Iterator[ServerProcess]:
    """Runs a server on a free port, ready, with the embedded model unless the flags name one; kills it at the end if it
    still runs."""
    command = [sys.executable, "-m", "server", "serve", "--port", "0", "--log-level", "warning", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield ServerProcess(process, _url_of(process))
        if process.poll() is None:
            process.send_signal(SIGTERM)
            process.communicate(timeout=SETTLE_S)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _url_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("  listens "):
            return line.split()[1]
    raise AssertionError("the server never got ready")


def eventually(condition: Callable[[], bool], within_s: float = SETTLE_S) -> bool:
    """Returns whether the condition holds in time."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True
