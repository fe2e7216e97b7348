"""A lease on a file that this process maps: whoever is about to write to the file or to truncate it waits until this
process has ended.

A page of a mapped file that is gone when it is read ends the process with SIGBUS, and one that was written meanwhile
would be read as it is then. `fcntl(2)` has leases.
"""

import fcntl
import logging
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["end_before_changes"]

logger = logging.getLogger(__name__)

_EXIT_CODE = 1


def end_before_changes(file: BinaryIO, path: Path) -> None:
    """Ends this process, with a sentence in its log, as soon as anybody opens the file to write, until it is closed.
    Others may read, rename and delete it. Raises BlockingIOError if somebody has it open to write.

    Does nothing where there are no leases: in threads other than the main one, of files of other users, on some file
    systems.
    """

    def end(*_: object) -> None:
        logger.critical("%s, whose weights are in use, is about to be changed: this engine process ends before", path)
        os._exit(_EXIT_CODE)

    with suppress(ValueError):  # not the main thread, which alone may handle signals
        before = signal.signal(signal.SIGIO, end)
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except BlockingIOError:
            signal.signal(signal.SIGIO, before)
            raise BlockingIOError("somebody is writing to it") from None
        except OSError:
            signal.signal(signal.SIGIO, before)
