"""What the scheduling policy asks of a KV store."""

from collections.abc import Sequence
from typing import Protocol


class StoredBlocks(Protocol):
    """What the KV store holds, as far as it is known at this moment: blocks, by their hashes, and states, by
    `engine.core.batch.name_of_states`."""

    def num_stored(self, names: Sequence[bytes]) -> int:
        """Returns how many of the first of these are stored, without a gap."""

    def announce(self, names: Sequence[bytes]) -> None:
        """Takes these as stored because another server says it has stored them. What is wrong costs a read that
        fails."""

    def touch(self, names: Sequence[bytes]) -> None:
        """Makes these the most recently used ones, the first of them above all, where they are stored."""
