"""Whether this machine has an NVIDIA GPU that torch cannot use, for its build has no CUDA, and what to do then."""

import sys
from pathlib import Path

import torch

__all__ = ["cuda_build_advice"]

_DRIVER = Path("/dev/nvidiactl")
_WHEELS = "https://download.pytorch.org/whl/cu130"


def cuda_build_advice() -> str | None:
    """Returns a sentence with the command that installs torch with CUDA; None where there is no NVIDIA driver, or torch
    has CUDA already."""
    if torch.version.cuda is not None or not _DRIVER.exists():
        return None
    release = torch.__version__.partition("+")[0]
    return (
        "This machine has an NVIDIA GPU, and its torch has no CUDA: install one that has, with "
        f"{sys.executable} -m pip install --force-reinstall --index-url {_WHEELS} torch=={release}."
    )
