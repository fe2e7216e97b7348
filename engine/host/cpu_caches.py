"""The CPU's caches, as Linux tells of them; torch-free."""

from pathlib import Path

__all__ = ["largest_cache_bytes"]

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def largest_cache_bytes(caches: Path = _CACHES) -> int:
    """Returns the size of the largest cache of the first CPU; 0 where the system does not tell. The C library's
    `sysconf` is no better source: on virtual machines it was seen to tell ten times the size."""
    return max(map(_size_of, caches.glob("index*/size")), default=0)


def _size_of(file: Path) -> int:
    try:
        text = file.read_text(encoding="ascii").strip()
        return int(text[:-1]) * _UNITS[text[-1:]]
    except (OSError, ValueError, KeyError):
        return 0
