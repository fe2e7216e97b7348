import ctypes
import os
import resource
from pathlib import Path

import pytest

from engine.memory import give_back_freed_memory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_what_was_freed_below_something_in_use_goes_back_to_the_system() -> None:
    hasattr(ctypes.CDLL(None), "malloc_trim") or pytest.skip("the C library keeps what it wants")
    before = resident_bytes()
    pieces = [bytes(4000) for _ in range(25_000)]
    last = bytes(4000)  # above them: the heap cannot just shrink
    del pieces
    give_back_freed_memory()
    assert resident_bytes() < before + 30e6 and len(last) == 4000
