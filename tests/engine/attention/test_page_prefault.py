"""Pages of the KV cache are prefaulted before they are needed, few at a time, and lose nothing that was written."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.page_prefault import PagePrefault
from engine.host.huge_pages import HUGE_PAGE, PrivatePages, empty_in_huge_pages
from tests.resident_memory import resident_bytes


def has_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


def blocks(num_blocks: int, block_bytes: int) -> Tensor:
    return empty_in_huge_pages((num_blocks, block_bytes), torch.uint8, torch.device("cpu"))


def test_what_was_written_stays() -> None:
    tensors = [blocks(64, HUGE_PAGE // 8), blocks(64, HUGE_PAGE // 16)]
    for tensor in tensors:
        tensor.fill_(7)
    pages = PagePrefault(tensors, PrivatePages().allocate)
    for block in range(64):
        pages.prefault(block, 1)
    assert all((tensor == 7).all() for tensor in tensors)


@pytest.mark.skipif(not has_huge_pages(), reason="this system has no huge pages")
def test_no_page_is_empty_when_its_blocks_are_written() -> None:
    """Resident memory grows when pages are prefaulted, and no longer when blocks are written."""
    tensors = [blocks(256, HUGE_PAGE // 32), blocks(256, HUGE_PAGE // 64), blocks(256, HUGE_PAGE // 32)]
    pages = PagePrefault(tensors, PrivatePages().allocate)
    for block in range(192):
        pages.prefault(block, 1)
        before = resident_bytes()
        for tensor in tensors:
            tensor[block].fill_(1)
        assert resident_bytes() - before < HUGE_PAGE // 2, block


@given(
    block_bytes=st.lists(st.integers(1, 64).map(lambda size: size << 13), min_size=1, max_size=6),
    steps=st.lists(st.integers(0, 9), min_size=1, max_size=40),
)
def test_pages_come_in_order_ahead_of_the_blocks_and_evenly(block_bytes: list[int], steps: list[int]) -> None:
    num_blocks = sum(steps) + 1
    tensors = [torch.empty(num_blocks, size, dtype=torch.uint8) for size in block_bytes]
    pages = PagePrefault(tensors, PrivatePages().allocate)
    starts = sorted(
        at // tensor[0].nbytes
        for tensor in tensors
        for at in range(-tensor.data_ptr() % HUGE_PAGE, tensor.nbytes, HUGE_PAGE)
    )
    rate, block = sum(block_bytes) / HUGE_PAGE, 0
    for step in steps:
        block += step
        before = pages.num_touched
        pages.prefault(block, step)
        touched = pages.num_touched - before
        assert touched <= step * rate + 1
        assert all(start > block for start in starts[pages.num_touched :])


def test_skipped_blocks_are_caught_up_with_a_page_at_a_time() -> None:
    pages = PagePrefault([blocks(2048, HUGE_PAGE // 64) for _ in range(2)], PrivatePages().allocate)
    touched = [pages.num_touched]
    for block in (640, *range(641, 700)):
        pages.prefault(block, 1)
        touched.append(pages.num_touched)
    assert {after - before for before, after in itertools.pairwise(touched)} == {0, 1}
    assert touched[-1] - touched[0] == 699 * 2 // 64


def test_memory_is_left_alone_far_from_what_is_written() -> None:
    before = resident_bytes()
    tensors = [blocks(1024, HUGE_PAGE // 16) for _ in range(4)]
    pages = PagePrefault(tensors, PrivatePages().allocate)
    for block in range(32):
        pages.prefault(block, 1)
    assert resident_bytes() - before < 20 * HUGE_PAGE


def test_other_devices_have_no_pages() -> None:
    pages = PagePrefault([torch.empty(8, HUGE_PAGE, device="meta")], PrivatePages().allocate)
    pages.prefault(7, 8)
    assert pages.num_touched == 0
