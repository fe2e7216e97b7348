"""The kernels' thread pool: threads that are free do the work, and a loop does not wait for others."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kernels import load_kernels
from engine.weights.packed_weight import KernelWeight

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture
def product() -> tuple[KernelWeight, Tensor, Tensor]:
    """Returns a packed weight, rows, and their product on one thread."""
    load_kernels() or pytest.skip("no kernels on this machine")
    packed, x = KernelWeight(torch.randn(700, 900)), torch.randn(20, 900)
    torch.set_num_threads(1)
    expected = packed.multiply(x, None)
    torch.set_num_threads(2)
    return packed, x, expected


def test_many_callers_at_once_get_what_each_gets_alone(product: tuple[KernelWeight, Tensor, Tensor]) -> None:
    packed, x, expected = product
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda _: packed.multiply(x, None), range(300)))
    assert all(torch.equal(result, expected) for result in results)


def test_more_threads_than_cores_share_the_work(product: tuple[KernelWeight, Tensor, Tensor]) -> None:
    packed, x, expected = product
    for num_threads in (9, 3, 40, 2):
        torch.set_num_threads(num_threads)
        assert all(torch.equal(packed.multiply(x, None), expected) for _ in range(50)), num_threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_has_none_of_the_threads_and_works_alone(product: tuple[KernelWeight, Tensor, Tensor]) -> None:
    packed, x, expected = product
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(packed.multiply(x, None), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no way to say where a thread runs")
def test_after_a_pause_they_are_moved_to_other_cpus_and_then_may_run_on_any(
    product: tuple[KernelWeight, Tensor, Tensor],
) -> None:
    packed, x, _ = product
    packed.multiply(x, None)
    allowed, mine = os.sched_getaffinity(0), threading.get_native_id()
    if len(allowed) == 1:
        pytest.skip("one CPU")
    others = [thread for thread in map(int, os.listdir("/proc/self/task")) if thread != mine]
    for thread in others:
        os.sched_setaffinity(thread, {min(allowed)})
    try:
        time.sleep(0.01)
        packed.multiply(x, None)
        assert eventually(lambda: any(os.sched_getaffinity(thread) == allowed for thread in others))
    finally:
        for thread in others:
            os.sched_setaffinity(thread, allowed)


@pytest.mark.slow
def test_where_openmp_binds_threads_the_kernels_have_all_cpus() -> None:
    """Torch's OpenMP binds the thread that loads it, and the kernels' threads inherit that thread's CPUs."""
    script = """
        import os
        cpus = os.sched_getaffinity(0)

        from engine.core.config import EngineConfig
        from engine.assembly import load_engine
        load_engine(EngineConfig(model="engine/embedded_model", device="cpu"))
        assert os.sched_getaffinity(0) == cpus
    """
    environment = os.environ | {"OMP_PROC_BIND": "true"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    assert subprocess.run(command, env=environment, cwd=ROOT, timeout=120).returncode == 0


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether the condition becomes true within seconds."""
    return any(condition() or time.sleep(0.01) for _ in range(1000))
