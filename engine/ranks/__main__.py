"""The process of a rank: `python -m engine.ranks LINK_FD SHARED_FD`, started by `engine.ranks.processes`.

It loads its part of the model, and then runs the forward passes that the first rank tells of. Its standard input is a
pipe that ends when the first rank's process does, however that dies; then this process ends, too, even if it was
stopped.
"""

import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn

from engine.host.parent_death import signal_when_parent_dies


def end_after_parent(parent_fd: int) -> None:
    """Ends this process at once when its parent has ended."""
    end = select.poll()
    end.register(parent_fd, select.POLLHUP)
    end.poll()
    os._exit(1)


def end_with(run: Callable[[], int]) -> NoReturn:
    """Ends this process with the exit code that `run` returns, or 1 after the traceback of an error: at once, since a
    GPU may wait for what other ranks never begin."""
    code = 1
    try:
        code = run()
    except Exception:
        traceback.print_exc()
    os._exit(code)


if __name__ == "__main__":
    signal_when_parent_dies(signal.SIGCONT)  # so that a stopped process, too, notices and ends
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the first rank's process decides what they mean
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_after_parent, args=(sys.stdin.fileno(),), daemon=True).start()
    from engine.host.memory_trim import share_one_malloc_arena

    share_one_malloc_arena()
    from engine.host.lean_torch import make_torch_lean

    make_torch_lean()
    from engine.ranks.rank import run

    end_with(lambda: run(Connection(int(sys.argv[1])), int(sys.argv[2])))
