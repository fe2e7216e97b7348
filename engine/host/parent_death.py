"""What becomes of a process whose parent dies."""

import ctypes

__all__ = ["signal_when_parent_dies"]

_PR_SET_PDEATHSIG = 1  # in Linux's prctl.h


def signal_when_parent_dies(number: int) -> None:
    """Has the kernel send this process the signal when its parent dies, however it does; to be exact, when the thread
    does that started it. On other systems nothing happens."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    except (OSError, AttributeError):
        return
