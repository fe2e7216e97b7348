"""A process that has started keeps less than its start took. On Linux with glibc; elsewhere all stays as it is."""

import contextlib
import ctypes
import gc
import mmap
import re
from pathlib import Path

__all__ = ["drop_code_pages", "give_back_freed_memory", "settle", "share_one_heap"]

_M_ARENA_MAX = -8  # in glibc's malloc.h

# Code of a file, of which this process has changed no page: no relocation, no debugger's breakpoint.
_UNCHANGED_CODE = re.compile(
    r"^(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) r-xp \S+ \S+ \S+ +/.*\n(?:\w+:.*\n)*?Anonymous: +0 kB$", re.MULTILINE
)


def share_one_heap() -> None:
    """Call before threads start. Each would have a heap of its own, of which glibc keeps what was freed last: 35 MB of
    threads that quantized a model of 0.5 B weights to 8 bits."""
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such function
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def settle() -> None:
    """Call once all is there that lives as long as the process. No collection, which holds up all streams, looks at it
    again, and what only the start needed leaves."""
    gc.collect()
    gc.freeze()
    give_back_freed_memory()
    drop_code_pages()


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
