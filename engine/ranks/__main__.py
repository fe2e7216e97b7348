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
from multiprocessing.connection import Connection

from engine.host.parent_death import signal_when_parent_dies


def end_after_parent(parent_fd: int) -> None:
    """Ends this process at once when its parent has ended."""
    end = select.poll()
    end.register(parent_fd, select.POLLHUP)
    end.poll()
    os._exit(1)


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

    sys.exit(run(Connection(int(sys.argv[1])), int(sys.argv[2])))
