"""The engine process as a program."""

import os
import subprocess
import sys


def test_threads_of_torch_spin_for_a_short_time() -> None:
    """OpenMP reads the setting as torch is imported, and then tells it; the descriptors are none, so that is all."""
    environment = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    command = [sys.executable, "-m", "engine.process", "98", "99"]
    result = subprocess.run(
        command,
        env=environment | {"OMP_DISPLAY_ENV": "VERBOSE"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "GOMP_SPINCOUNT = '20000'" in result.stderr
