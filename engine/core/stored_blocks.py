"""What the scheduling policy asks of a KV store."""

from collections.abc import Sequence
from typing import Protocol


class StoredBlocks(Protocol):
    """What the KV store holds, as far as it is known at this moment."""

    def num_stored(self, block_hashes: Sequence[bytes]) -> int:
        """Returns how many of the first blocks are stored, without a gap."""

    def announce(self, block_hashes: Sequence[bytes]) -> None:
        """Takes blocks as stored that another server says it has stored. What is wrong costs a read that fails."""

    def touch(self, block_hashes: Sequence[bytes]) -> None:
        """Makes blocks the most recently used ones, the first of them above all, where they are stored."""
