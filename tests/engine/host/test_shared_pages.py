"""Shared pages hold what was written to them, in huge pages, after whoever wrote it has gone."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.host.huge_pages import HUGE_PAGE
from engine.host.shared_pages import SharedPages
from tests.resident_memory import resident_bytes

CPU = torch.device("cpu")
WRITE_AND_DIE = """
import os, signal, sys, torch
from engine.host.shared_pages import SharedPages
pages = SharedPages(int(sys.argv[1]), 0)
for number in (1, 2):
    pages.empty((1000, 1000), torch.int32, torch.device("cpu")).fill_(number)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_wrote_is_there(memory_fd: int) -> None:
    subprocess.run([sys.executable, "-c", WRITE_AND_DIE, str(memory_fd)], pass_fds=(memory_fd,), check=False)
    pages = SharedPages(memory_fd, 0)
    first, second, new = (pages.empty((1000, 1000), torch.int32, CPU) for _ in range(3))
    assert (first == 1).all() and (second == 2).all() and (new == 0).all()


@pytest.mark.parametrize("shape", [(3, 5), (1000, 2, 16, 64), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_what_is_written_is_read(memory_fd: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pages = SharedPages(memory_fd, 0)
    tensors = [pages.empty(shape, dtype, CPU) for _ in range(3)]
    numbers = [(100 * torch.rand(shape)).to(dtype) for _ in tensors]
    for tensor, own in zip(tensors, numbers, strict=True):
        tensor.copy_(own)
    assert all(map(torch.equal, tensors, numbers)) and all(tensor.is_contiguous() for tensor in tensors)
    again = SharedPages(memory_fd, 0)
    assert all(torch.equal(again.empty(shape, dtype, CPU), own) for own in numbers)


def test_only_what_is_written_takes_memory_and_it_stays_until_the_file_is_emptied(memory_fd: int) -> None:
    before = resident_bytes()
    pages = SharedPages(memory_fd, 1 << 30)
    tensor = pages.empty((256, 1 << 18), torch.float32, CPU)
    assert pages.allocated_bytes == 0 and resident_bytes() < before + 20e6
    tensor[:100] = 1
    assert 100e6 < pages.allocated_bytes < 120e6
    del tensor
    assert resident_bytes() < before + 20e6 and pages.allocated_bytes > 100e6
    os.ftruncate(memory_fd, 0)
    assert pages.allocated_bytes == 0


def mapped_in_huge_pages() -> int:
    found = re.search(r"ShmemPmdMapped: +(\d+)", Path("/proc/self/smaps_rollup").read_text())
    return int(found[1]) * 1024 if found else 0


def has_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    release = tuple(map(int, os.uname().release.split(".")[:2]))
    return setting.exists() and "[never]" not in setting.read_text() and release >= (6, 1)


@pytest.mark.skipif(not has_huge_pages(), reason="this system has no huge pages, or none for shared memory")
def test_pages_are_huge_and_lose_nothing(memory_fd: int) -> None:
    before = mapped_in_huge_pages()
    pages = SharedPages(memory_fd, 0)
    pages.empty((5,), torch.uint8, CPU)
    tensor = pages.empty((4 * HUGE_PAGE,), torch.uint8, CPU)
    tensor[HUGE_PAGE : 2 * HUGE_PAGE] = 7  # written in ordinary pages
    for at in range(0, 4 * HUGE_PAGE, HUGE_PAGE):
        pages.allocate(tensor[at : at + 1])
    assert mapped_in_huge_pages() - before == pages.allocated_bytes == 4 * HUGE_PAGE
    assert (tensor.view(4, -1) == torch.tensor([0, 7, 0, 0])[:, None]).all()


def test_a_file_that_may_not_be_so_long_is_an_error(memory_fd: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            SharedPages(memory_fd, 1 << 21)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_children_do_not_hold_the_memory(memory_fd: int) -> None:
    os.set_inheritable(memory_fd, True)
    SharedPages(memory_fd, 0)
    assert not os.get_inheritable(memory_fd)
