"""Memory that a process returns to the system after its start, and code that must survive it."""

import ctypes
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.host.memory_trim import drop_code_pages, give_back_freed_memory
from tests.resident_memory import resident_bytes

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="reads /proc")

CODE = bytes(range(256)) * 256


def resident_bytes_of(file: Path) -> int:
    (kilobytes,) = re.findall(rf" {file}\n(?:\w+:.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    return int(kilobytes) * 1024


def code_in(file: Path, protection: int = mmap.PROT_READ | mmap.PROT_EXEC) -> mmap.mmap:
    file.write_bytes(CODE)
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE, protection)


def make_unwritable(code: mmap.mmap) -> None:
    """Makes the pages read-only again, as a loader does after relocating code, and a debugger after setting a
    breakpoint."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    protection = mmap.PROT_READ | mmap.PROT_EXEC
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(code)), protection) == 0


def test_what_was_freed_below_something_in_use_goes_back_to_the_system() -> None:
    hasattr(ctypes.CDLL(None), "malloc_trim") or pytest.skip("the C library keeps what it wants")
    before = resident_bytes()
    pieces = [bytes(4000) for _ in range(25_000)]
    last = bytes(4000)  # above them: the heap cannot just shrink
    del pieces
    give_back_freed_memory()
    assert resident_bytes() < before + 30e6 and len(last) == 4000


def test_what_threads_freed_goes_back_and_what_stays_is_not_collected_again() -> None:
    hasattr(ctypes.CDLL(None), "mallopt") or pytest.skip("the C library has its own way with threads")
    code = """
import gc, threading, weakref
from engine.host.memory_trim import trim_after_startup, share_one_malloc_arena
from tests.resident_memory import resident_bytes
share_one_malloc_arena()
b"-" * 30_000_000  # after which glibc keeps as much for reuse
before = resident_bytes()
def work():
    pieces = [b"-" * 100_000 for _ in range(250)]
thread = threading.Thread(target=work)
thread.start()
thread.join()
class Cycle: ...
cycle = Cycle()
cycle.itself = cycle
rest = weakref.ref(cycle)
del cycle
trim_after_startup()
print(resident_bytes() - before, gc.get_freeze_count(), rest() is None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, num_frozen, is_collected = done.stdout.split()
    assert int(grown) < 10e6 and int(num_frozen) > 1000 and is_collected == "True"


def test_dropped_code_takes_no_memory_and_is_read_again_when_used(tmp_path: Path) -> None:
    code = code_in(tmp_path / "code")
    assert code[:] == CODE and resident_bytes_of(tmp_path / "code") == len(CODE)
    drop_code_pages()
    assert resident_bytes_of(tmp_path / "code") == 0
    assert code[:] == CODE


def test_code_that_was_changed_in_memory_stays_as_it_is(tmp_path: Path) -> None:
    others = [code_in(tmp_path / name) for name in ("before", "after")]
    code = code_in(tmp_path / "changed", mmap.PROT_READ | mmap.PROT_WRITE)
    code[5000] = 0x90
    make_unwritable(code)
    drop_code_pages()
    assert code[:] == CODE[:5000] + b"\x90" + CODE[5001:]
    assert [other[:] for other in others] == [CODE, CODE]


def test_a_system_without_either_keeps_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    code = code_in(tmp_path / "code")
    assert code[:] == CODE
    give_back_freed_memory()
    drop_code_pages()
    assert resident_bytes_of(tmp_path / "code") == len(CODE)
