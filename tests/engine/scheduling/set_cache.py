"""A prefix cache that is told which blocks it holds."""

from engine.scheduling.prefix_cache import NullPrefixCache


class SetCache(NullPrefixCache):
    """A prefix cache that holds the blocks in `blocks`."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()

    def holds(self, block_id: int) -> bool:
        return block_id in self.blocks

    def touch(self, block_id: int) -> None:
        assert block_id in self.blocks

    def forget(self, block_id: int) -> None:
        self.blocks.remove(block_id)
