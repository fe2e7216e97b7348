"""Memory for the KV cache that outlives the engine process: an anonymous file, whose descriptor the server holds.

The server maps none of it. An engine process makes it as long as it needs; the last process that holds the descriptor
takes the memory with it, however it ends.
"""

import os


class KVMemory:
    """The memory that the engine processes of one server use in turn."""

    def __init__(self) -> None:
        """Makes empty memory. Raises OSError."""
        self.fd = os.memfd_create("twostep-kv")

    def clear(self) -> None:
        """Gives back all memory; call while no process uses it."""
        os.ftruncate(self.fd, 0)

    def close(self) -> None:
        """Gives the descriptor up. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
