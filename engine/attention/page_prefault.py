"""Prefaults pages of the KV cache: the operating system allocates them before they are needed, a few in each step.

Memory is allocated and zeroed when it is first written, a huge page at a time, which takes 1 to 4 ms. All layers' keys
and values need their next page in the same step: with 24 layers it took 90 ms longer, and so did the gap between two
tokens.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import ceil
from operator import itemgetter

import torch
from torch import Tensor

from engine.host.huge_pages import HUGE_PAGE

__all__ = ["PagePrefault"]


class PagePrefault:
    """Prefaults the pages of tensors that are written block by block, from the first block on.

    Pages are touched at the rate at which blocks are taken, and so far ahead that no step meets an unallocated one.
    """

    def __init__(self, tensors: Sequence[Tensor], allocate: Callable[[Tensor], None]) -> None:
        """Touches the first pages of `tensors` [num_blocks, ...], contiguous; tensors off the CPU are left alone.
        `allocate` is given the first byte [1] of each page."""
        tensors = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.numel() > 0]
        self._pages = heapq.merge(*map(_pages_of, tensors), key=itemgetter(0))
        self._pages_per_block = sum(map(_block_bytes, tensors)) / HUGE_PAGE
        self._lead = max((ceil(HUGE_PAGE / _block_bytes(tensor)) for tensor in tensors), default=0)
        self._allocate = allocate
        self.num_touched = 0
        self._touch(self._num_due(0))

    def prefault(self, last_block: int, num_blocks: float) -> None:
        """Touches the pages that are due before a step that writes `num_blocks` blocks, `last_block` the highest.

        At most as many pages are touched as these blocks take, and one more to catch up where blocks were skipped.
        """
        self._touch(min(self._num_due(last_block), 1 + int(num_blocks * self._pages_per_block)))

    def map_allocated(self, last_block: int) -> None:
        """Touches all pages up to those of this block, which are there already and only have to be mapped."""
        self._touch(self._num_due(last_block))

    def _num_due(self, block: int) -> int:
        return max(0, ceil((block + 1 + self._lead) * self._pages_per_block) - self.num_touched)

    def _touch(self, count: int) -> None:
        self.num_touched += count
        for _, byte in islice(self._pages, count):
            self._allocate(byte)


def _pages_of(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields, for each page, the block in which it begins and its first byte, [1] uint8."""
    memory = tensor.view(-1).view(torch.uint8)
    for at in range(-tensor.data_ptr() % HUGE_PAGE, len(memory), HUGE_PAGE):
        yield at // _block_bytes(tensor), memory[at : at + 1]


def _block_bytes(tensor: Tensor) -> int:
    return tensor[0].nbytes
