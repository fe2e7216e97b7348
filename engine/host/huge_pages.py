"""Tensors in huge pages, for memory that steps read at scattered places: with pages of 4 KiB, every KV block costs a
page walk."""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["HUGE_PAGE", "PrivatePages", "empty_in_huge_pages"]

HUGE_PAGE = 2 << 20  # bytes: the usual size


def empty_in_huge_pages(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns an uninitialized tensor; on the CPU the operating system allocates its memory when first written, 2 MiB
    at a time.

    Its pages are ordinary ones where the system has no huge ones, and on other devices.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


class PrivatePages:
    """Hands out memory that ends with this process."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns an uninitialized tensor, as `empty_in_huge_pages` does."""
        return empty_in_huge_pages(shape, dtype, device)

    def allocate(self, page: Tensor) -> None:
        """Allocates the page that begins with `page` [1] uint8."""
        page.add_(0)  # adds nothing, since the page may hold data already
