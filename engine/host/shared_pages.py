"""Memory that outlives a process: the pages of a file without a name, which whoever holds its descriptor maps again.

Such memory can have huge pages only where address and place in the file are both at the beginning of one, and by most
systems' setting (`shmem_enabled`) none comes by itself: each is asked for.
"""

import ctypes
import functools
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.host.huge_pages import HUGE_PAGE

__all__ = ["SharedPages"]

_PROT_NONE, _MAP_FIXED, _MADV_COLLAPSE = 0, 0x10, 25  # of Linux, and not among the names in `mmap`
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class SharedPages:
    """Hands out the memory of a file from its beginning on, in pieces that begin with a huge page each. They hold what
    was written there before, by whichever process, and zeros where nothing was."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Makes the file at least so long, which takes no memory yet. Raises OSError where that is not allowed."""
        os.set_inheritable(fd, False)
        if os.fstat(fd).st_size < num_bytes:
            os.ftruncate(fd, num_bytes)
        self._fd = fd
        self._end = 0
        self._wants_huge_pages = _SETTING.exists() and "[never]" not in _SETTING.read_text()

    @property
    def allocated_bytes(self) -> int:
        """Memory that the file has already, whoever wrote it."""
        return os.fstat(self._fd).st_blocks * 512

    @property
    def handed_out_bytes(self) -> int:
        """Size of the pieces so far, which is where the next one begins in the file."""
        return self._end

    def take(self, num_bytes: int) -> "ctypes.Array[ctypes.c_char]":
        """Returns the next piece of the file's memory. Raises OSError where it cannot be mapped."""
        start, self._end = self._end, self._end + -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
        if os.fstat(self._fd).st_size < self._end:
            os.ftruncate(self._fd, self._end)
        return _mapped(self._fd, start, self._end - start, num_bytes)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a tensor in the next piece; only for the CPU."""
        assert device.type == "cpu"
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(*shape, dtype=dtype)
        return torch.frombuffer(self.take(num_bytes), dtype=dtype).view(*shape)

    def allocate(self, page: Tensor) -> None:
        """Allocates the huge page that begins with `page` [1] uint8, in one piece unless the system has huge pages
        switched off or is too old for it (Linux 6.1)."""
        page.add_(0)  # adds nothing, since the page may hold data already
        if self._wants_huge_pages:
            _libc().madvise(page.data_ptr(), HUGE_PAGE, _MADV_COLLAPSE)


def _mapped(fd: int, offset: int, length: int, num_bytes: int) -> "ctypes.Array[ctypes.c_char]":
    """Maps `length` bytes of a file from a multiple of HUGE_PAGE on, at such an address, for as long as the buffer of
    the first `num_bytes` lives."""
    libc, reserved = _libc(), length + HUGE_PAGE
    base = libc.mmap(None, reserved, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if base == ctypes.c_void_p(-1).value:
        raise _last_error()
    start = -(-base // HUGE_PAGE) * HUGE_PAGE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mmap(start, length, access, mmap.MAP_SHARED | _MAP_FIXED, fd, offset) != start:
        error = _last_error()
        libc.munmap(base, reserved)
        raise error
    libc.madvise(start, length, mmap.MADV_HUGEPAGE)
    buffer = (ctypes.c_char * num_bytes).from_address(start)
    weakref.finalize(buffer, libc.munmap, base, reserved).atexit = False  # tensors may be used to the very end
    return buffer


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = [address, size, number, number, number, ctypes.c_long], address
    libc.munmap.argtypes = [address, size]
    libc.madvise.argtypes = [address, size, number]
    return libc
