"""The CPU's caches, as Linux tells of them; torch-free."""

from pathlib import Path

__all__ = ["all_caches_bytes", "largest_cache_bytes"]

_CPUS = Path("/sys/devices/system/cpu")
_CACHES = _CPUS / "cpu0" / "cache"
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def largest_cache_bytes(caches: Path = _CACHES) -> int:
    """Returns the size of the largest cache of the first CPU; 0 where the system does not tell. The C library's
    `sysconf` is no better source: on virtual machines it was seen to tell ten times the size."""
    return max(map(_size_of, caches.glob("index*/size")), default=0)


def all_caches_bytes(cpus: Path = _CPUS) -> int:
    """Returns what the largest caches of all CPUs hold together, each counted once however many share it; 0 where the
    system does not tell."""
    sizes: dict[str, int] = {}
    for caches in cpus.glob("cpu[0-9]*/cache"):
        largest = max(caches.glob("index*/size"), key=_size_of, default=None)
        if largest is not None:
            sizes[_shared_by(largest.with_name("shared_cpu_list")) or str(caches)] = _size_of(largest)
    return sum(sizes.values())


def _shared_by(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _size_of(file: Path) -> int:
    try:
        text = file.read_text(encoding="ascii").strip()
        return int(text[:-1]) * _UNITS[text[-1:]]
    except (OSError, ValueError, KeyError):
        return 0
