"""The kernels' threads: whoever is there does the work, and a loop waits for nobody who is not."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from engine.kernels import load_kernels
from engine.packed_weight import KernelWeight

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture
def product() -> tuple[KernelWeight, Tensor, Tensor]:
    """A packed weight, rows, and what comes out on one thread."""
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
