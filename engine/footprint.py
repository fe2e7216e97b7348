"""A process that has started keeps less than its start took. On Linux with glibc; elsewhere all stays as it is."""

import contextlib
import ctypes
import mmap
import re
from pathlib import Path

__all__ = ["drop_code_pages", "give_back_freed_memory"]

# Code of a file, of which this process has changed no page: no relocation, no debugger's breakpoint.
_UNCHANGED_CODE = re.compile(
    r"^(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) r-xp \S+ \S+ \S+ +/.*\n(?:\w+:.*\n)*?Anonymous: +0 kB$", re.MULTILINE
)


def give_back_freed_memory() -> None:
    """What was taken and freed goes back to the system; after a model was loaded, glibc keeps some 40 MB for reuse."""
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such function
        ctypes.CDLL(None).malloc_trim(0)


def drop_code_pages() -> None:
    """Code leaves this process until it is called; then its pages come back from the file, still cached by the system.

    Importing torch and transformers and loading a model runs 110 MB of libraries' code, of which steps run 30.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system has no such file or function
        madvise = ctypes.CDLL(None).madvise
        for mapping in _UNCHANGED_CODE.finditer(Path("/proc/self/smaps").read_text(errors="replace")):
            start, end = int(mapping["start"], 16), int(mapping["end"], 16)
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
