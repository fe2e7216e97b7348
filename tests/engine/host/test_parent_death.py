"""A process that does not outlive its parent."""

import os
import signal
import subprocess
import sys
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
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such signals")
def test_it_gets_its_signal_when_the_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert lives(pid)
        parent.kill()
    try:
        assert eventually(lambda: not lives(pid))
    finally:
        if lives(pid):
            os.kill(pid, signal.SIGKILL)
