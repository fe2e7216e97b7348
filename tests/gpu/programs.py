"""Programs of tests of kernels in Triton, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def output_of(*program: str, **settings: str) -> str:
    """Returns what a program prints, which is interpreted where there is no GPU."""
    command = [sys.executable, "-m", *program]
    environment = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}) | settings
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
