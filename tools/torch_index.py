"""`python -m tools.torch_index`: prints pip's arguments for PyTorch's CPU wheels, or nothing where they are not wanted.

PyPI's torch for x86-64 brings CUDA, several gigabytes. Runs before anything is installed: the standard library only.
"""

import os
import platform
import sys
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path

CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
_DRIVER = Path("/dev/nvidiactl")
_TIMEOUT_S = 5.0


def torch_index(environment: Mapping[str, str], driver: Path = _DRIVER, index: str = CPU_WHEELS) -> str | None:
    """Returns the index of PyTorch's CPU wheels; None on other machines than x86-64 Linux, where there is an NVIDIA
    driver, where the user chose indexes or forbade them, and where it does not answer."""
    is_chosen = any(name in environment for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"))
    is_meant = sys.platform == "linux" and platform.machine() == "x86_64" and not driver.exists()
    return index if is_meant and not is_chosen and _answers(f"{index}/torch/") else None


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_TIMEOUT_S):
            return True
    except (OSError, HTTPException):
        return False


if __name__ == "__main__":
    found = torch_index(os.environ)
    print("" if found is None else f"--extra-index-url {found}")
