"""How much memory is left for the KV cache, and which errors say that there was too little."""

import errno
import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int:
    """Free bytes of the device; on the CPU what the kernel can give, within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_system_available_bytes(), _cgroup_available_bytes())


def is_memory_shortage(error: Exception) -> bool:
    """On the CPU torch raises a plain RuntimeError, and `mmap` an OSError."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _system_available_bytes() -> int:
    available_kib = _figure(Path("/proc/meminfo"), "MemAvailable:")
    return available_kib * 1024 if available_kib else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_available_bytes() -> int:
    """What the cgroup (v2) of this container still allows; unlimited where there is none.

    Files that were read, like the checkpoint, count as its memory until something else needs the room: they are left
    out, as they are in MemAvailable.
    """
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        current = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62
    stat = _CGROUP / "memory.stat"
    used = max(0, current - _figure(stat, "inactive_file") - _figure(stat, "active_file"))
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)


def _figure(path: Path, name: str) -> int:
    """The number behind the name; 0 where there is none."""
    try:
        figures = dict(line.split()[:2] for line in path.read_text().splitlines())
        return int(figures.get(name, 0))
    except (OSError, ValueError):
        return 0
