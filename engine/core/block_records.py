"""Interface of what is known of the KV blocks after the end of the process that computed them.

The implementation is `engine.kv_store.block_records`.
"""

from collections.abc import Sequence
from typing import Protocol


class BlockRecords(Protocol):
    """Records which blocks hold which tokens, beside the blocks' memory."""

    @property
    def found(self) -> Sequence[tuple[int, bytes]]:
        """The blocks that an earlier process recorded, with their hashes, the least recently used first."""

    def add(self, block_id: int, block_hash: bytes) -> None:
        """Records a block, after all of it was written."""

    def touch(self, block_id: int) -> None:
        """Makes a recorded block the most recently used one."""

    def remove(self, block_id: int) -> None:
        """Records of a block that it holds nothing, before any of it is written."""

    def clear(self) -> None:
        """Removes all records."""


class NoBlockRecords:
    """Records nothing: the state where the blocks' memory ends with the process."""

    found: Sequence[tuple[int, bytes]] = ()

    def add(self, block_id: int, block_hash: bytes) -> None:
        pass

    def touch(self, block_id: int) -> None:
        pass

    def remove(self, block_id: int) -> None:
        pass

    def clear(self) -> None:
        pass
