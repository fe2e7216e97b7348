"""`python -m deploy.ray.child PARENT ...`: the program `twostep`, which ends when the process PARENT does."""

import os
import signal
import sys

from engine.host.parent_death import signal_when_parent_dies
from server.__main__ import main


def end_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, whatever that dies of; ends it now if that is gone."""
    signal_when_parent_dies(signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"the process {parent} is gone")


if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    sys.exit(main())
