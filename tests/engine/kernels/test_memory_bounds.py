"""The kernels' operators access nothing before or after their inputs."""

import subprocess
import sys

import pytest


@pytest.mark.usefixtures("ops")
def test_nothing_around_inputs_is_accessed() -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.engine.kernels.fenced_operators"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    cases = done.stdout.splitlines()
    assert done.returncode == 0, f"{cases[-1:]}: {done.returncode}\n{done.stderr[-4000:]}"
    assert len(cases) > 600
