"""A file as memory: read where it is used, and given back where memory runs short."""

import math
import mmap
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from engine.host.file_lease import end_before_changes

__all__ = ["MappedFile", "paging_bytes_per_s"]

_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # of asm-generic/mman.h; Python 3.11 does not name it
"""Else Linux refuses to map more than there is memory, although nothing is ever written."""
_NUM_SPANS = 16
_SPAN_BYTES = 1 << 20  # about an expert's matrix


class _Mapping(mmap.mmap):
    """Memory that, as long as it is in use, keeps its file open, if that is leased."""

    file: BinaryIO | None = None

    def __del__(self) -> None:
        if self.file is not None:
            self.file.close()


class MappedFile:
    """The content of a file. What is written to it stays with this process."""

    def __init__(self, path: Path, is_leased: bool = False) -> None:
        """The process ends before anybody changes a file that `is_leased`, while this or a tensor of it is in use.
        Raises OSError, or ValueError for an empty file."""
        with ExitStack() as stack:
            file = stack.enter_context(path.open("rb"))
            if is_leased:
                end_before_changes(file, path)
            self._memory = _Mapping(file.fileno(), 0, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE)
            if is_leased:
                self._memory.file = file
                stack.pop_all()

    def bytes_of(self, start: int, end: int) -> bytes:
        return self._memory[start:end]

    def tensor(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a view from the byte `start` on. Raises ValueError where the file ends before."""
        count = math.prod(shape)
        if not count:
            return torch.empty(*shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start).view(*shape)


def paging_bytes_per_s(path: Path) -> float:
    """Returns how fast pages of the file come from its disk, in pieces at places all over it, as mapped memory reads
    them. Raises OSError."""
    size = path.stat().st_size
    length = min(_SPAN_BYTES, size)
    starts = [(size - length) * index // _NUM_SPANS for index in range(_NUM_SPANS)]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        for start in starts:
            os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_DONTNEED)
        started_s = time.monotonic()
        for start in starts:
            memory[start : start + length : mmap.PAGESIZE]  # reads each page
        return len(starts) * length / max(time.monotonic() - started_s, 1e-9)
