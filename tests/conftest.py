"""What every test runs with: hypothesis without deadlines, one thread, Triton's interpreter where there is no GPU."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

# Durations mean nothing on a machine that others use, too.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Tests run beside one another, one process a core, and so do the servers that they start: with more threads than cores,
# each product of tiny matrices waits for a thread that does not run. Tests of threads set how many they need.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported


def pytest_collection_finish(session: pytest.Session) -> None:
    """Has the garbage collector pass over what was imported to collect the tests, which is there until the end: looking
    at it again and again took a tenth of their time."""
    del session
    gc.collect()
    gc.freeze()
