"""Which requests the engine computes at the moment, written so that it can be read after the engine's death.

An anonymous file in memory, held by both processes: what was written before a crash is there after it, and no disk can
be full. A step whose requests are those of the step before costs one comparison, any other one system call.
"""

import os
from collections.abc import Sequence

import msgspec

_HEADER_BYTES = 4


class CrashMarker:
    """Marks the requests being computed. File layout: length of the list (4 bytes), the list as msgpack, and after that
    remains of longer lists."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._marked: Sequence[str] = ()

    @classmethod
    def create(cls) -> "CrashMarker":
        return cls(os.memfd_create("twostep-step"))

    def mark(self, request_ids: Sequence[str]) -> None:
        """Mark these requests as being computed, until the next call. Call before the work begins."""
        if request_ids == self._marked:
            return
        self._marked = request_ids
        data = msgspec.msgpack.encode(request_ids)
        os.pwrite(self.fd, len(data).to_bytes(_HEADER_BYTES) + data, 0)

    def read(self) -> list[str]:
        """Returns the ids that were marked last, by whichever process: none before the first mark, or if the writer
        died while it wrote."""
        length = int.from_bytes(os.pread(self.fd, _HEADER_BYTES, 0))
        try:
            return msgspec.msgpack.decode(os.pread(self.fd, length, _HEADER_BYTES), type=list[str])
        except msgspec.MsgspecError:
            return []

    def close(self) -> None:
        os.close(self.fd)
