"""`python -m deploy.ray.child PARENT ...`: the program `twostep`, which ends when the process PARENT does."""

import ctypes
import os
import signal
import sys

from server.__main__ import main

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, whatever that dies of; ends it now if that is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"the process {parent} is gone")


if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    sys.exit(main())
