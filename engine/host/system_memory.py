"""How much memory the system can give this process; torch-free."""

import os
from pathlib import Path

__all__ = ["system_available_bytes"]

_CGROUP = Path("/sys/fs/cgroup")


def system_available_bytes() -> int:
    """Returns the bytes that the kernel can give, within the container's limit."""
    return min(_machine_available_bytes(), _cgroup_available_bytes())


def _machine_available_bytes() -> int:
    available_kib = _read_number(Path("/proc/meminfo"), "MemAvailable:")
    return available_kib * 1024 if available_kib else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_available_bytes() -> int:
    """Returns the bytes that the cgroup (v2) of this container still allows; 2^62 where there is no limit.

    The page cache of files that were read, like the checkpoint, counts as used memory until something else needs it:
    it is left out here, as in MemAvailable.
    """
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        current = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62
    stat = _CGROUP / "memory.stat"
    used = max(0, current - _read_number(stat, "inactive_file") - _read_number(stat, "active_file"))
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)


def _read_number(path: Path, name: str) -> int:
    """Returns the number after `name` in a file of names and numbers; 0 if it is missing."""
    try:
        numbers = dict(line.split()[:2] for line in path.read_text().splitlines())
        return int(numbers.get(name, 0))
    except (OSError, ValueError):
        return 0
