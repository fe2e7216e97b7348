"""Where a user's cached files are kept."""

import os
from pathlib import Path

__all__ = ["cache_home"]


def cache_home() -> Path:
    """Returns `twostep` in `$XDG_CACHE_HOME` or in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "twostep"
