"""A process that does not outlive its parent."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.soak.server import eventually

CHILD = """
import signal, time
from engine.host.parent_death import signal_when_parent_dies
signal_when_parent_dies(signal.SIGTERM)
print("ready", flush=True)
time.sleep(600)
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
if sys.argv[1] == "-c":
    child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such signals")


@contextmanager
def child_of_another(*command: str) -> Iterator[tuple[int, "subprocess.Popen[str]"]]:
    """Runs a child of a process, both ended at the end. Yields the child's process id, and its parent."""
    with subprocess.Popen([sys.executable, "-c", PARENT, *command], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            yield pid, parent
        finally:
            parent.kill()
            if lives(pid):
                os.kill(pid, signal.SIGKILL)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ignores_signals(pid: int) -> bool:
    """Returns whether the process ignores SIGTERM, as engine processes do from their first moment on."""
    ignored = re.search(r"SigIgn:\t(\w+)", Path(f"/proc/{pid}/status").read_text())
    assert ignored is not None
    return bool(int(ignored[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_it_gets_its_signal_when_the_parent_is_killed() -> None:
    with child_of_another("-c", CHILD) as (pid, parent):
        assert lives(pid)
        parent.kill()
        assert eventually(lambda: not lives(pid))


@pytest.mark.parametrize("program", ["engine.process", "engine.ranks"])
def test_a_stopped_engine_process_ends_when_its_parent_is_killed(program: str) -> None:
    no_descriptors = ("98", "99", "100")  # so what it would do next ends it, too, but not while it is stopped
    with child_of_another("-m", program, *no_descriptors) as (pid, parent):
        assert eventually(lambda: ignores_signals(pid))
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
        assert eventually(lambda: not lives(pid))
