"""Has the operating system fill pages with zeros before they are needed, a few in each step.

Memory is given when it is first written, a huge page at a time, which takes 1 to 4 ms. All layers' keys and values need
their next page in the same step: with 24 layers it took 90 ms longer, and so did the gap between two tokens.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import islice
from math import ceil
from operator import itemgetter

import torch
from torch import Tensor

from engine.host.huge_pages import HUGE_PAGE

__all__ = ["PagePrefault"]


class PagePrefault:
    """Of tensors that are written block by block, from the first on: fills pages at the rate at which blocks are taken,
    so far ahead that no step meets an empty one."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """`tensors` [num_blocks, ...], contiguous. Fills their first pages; those of other devices are left alone."""
        tensors = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.numel() > 0]
        self._pages = heapq.merge(*map(_pages_of, tensors), key=itemgetter(0))
        self._pages_per_block = sum(map(_block_bytes, tensors)) / HUGE_PAGE
        self._lead = max((ceil(HUGE_PAGE / _block_bytes(tensor)) for tensor in tensors), default=0)
        self.num_filled = 0
        self._fill(self._num_due(0))

    def reach(self, block: int, num_blocks: float) -> None:
        """Before a step that fills so many blocks, this one the last of all. Fills as many pages as these take, and one
        more where blocks were passed over."""
        self._fill(min(self._num_due(block), 1 + int(num_blocks * self._pages_per_block)))

    def _num_due(self, block: int) -> int:
        return max(0, ceil((block + 1 + self._lead) * self._pages_per_block) - self.num_filled)

    def _fill(self, count: int) -> None:
        self.num_filled += count
        for _, byte in islice(self._pages, count):
            byte.add_(0)  # it may have been written all the same


def _pages_of(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The block in which each page begins, and the page's first byte, [1] uint8."""
    memory = tensor.view(-1).view(torch.uint8)
    for at in range(-tensor.data_ptr() % HUGE_PAGE, len(memory), HUGE_PAGE):
        yield at // _block_bytes(tensor), memory[at : at + 1]


def _block_bytes(tensor: Tensor) -> int:
    return tensor[0].nbytes
