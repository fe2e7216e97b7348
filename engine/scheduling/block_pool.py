"""Ownership of KV blocks by reference count; torch-free.

A block is *held* while a block table counts it, *cached* while no table does but the prefix cache can still find it,
else *free*. free + held + cached = all blocks, always.
"""

from collections import OrderedDict
from collections.abc import Sequence

from engine.core.stats import PoolStats
from engine.scheduling.prefix_cache import BlockCache
from engine.scheduling.retention import Retention


class BlockPool:
    """Hands out blocks: free ones first, then the least recently used cached one, which the cache then forgets; those
    that are retained go last. So a retained block takes no room from a request, only from other cached ones."""

    def __init__(self, num_blocks: int, cache: BlockCache, max_retained: int = 0) -> None:
        self._cache = cache
        self._ref_counts = [0] * num_blocks
        self._cached = OrderedDict.fromkeys(cache.found)  # those not retained, least recently used first
        self._free = [block_id for block_id in range(num_blocks - 1, -1, -1) if block_id not in self._cached]
        self._cached_retained: OrderedDict[int, None] = OrderedDict()
        self._retention = Retention(max_retained)

    @property
    def num_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out: free and cached."""
        return len(self._free) + len(self._cached) + len(self._cached_retained)

    @property
    def stats(self) -> PoolStats:
        free, cached = len(self._free), len(self._cached) + len(self._cached_retained)
        return PoolStats(free=free, held=self.num_blocks - free - cached, cached=cached)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def try_allocate(self, num_new: int, shared: Sequence[int] = (), spare: int = 0) -> list[int] | None:
        """Take a reference on each `shared` block and on `num_new` others; return them all in that order.

        Returns None and changes nothing if fewer than `spare` available blocks would be left.
        """
        num_revived = sum(1 for block_id in shared if self._ref_counts[block_id] == 0)
        if self.num_available - num_revived < num_new + spare:
            return None
        for block_id in shared:
            if self._ref_counts[block_id] == 0:
                del self._cached_in(block_id)[block_id]
            self._ref_counts[block_id] += 1
        return [*shared, *(self._take() for _ in range(num_new))]

    def release(self, block_ids: Sequence[int]) -> None:
        """Give back one reference on each block of a block table.

        Later blocks become least recently used before earlier ones: a prefix outlives its continuations.
        """
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, f"block {block_id} released more often than taken"
            if self._ref_counts[block_id] == 0:
                if self._cache.holds(block_id):
                    self._cache.touch(block_id)
                    self._cached_in(block_id)[block_id] = None
                else:
                    self._free.append(block_id)

    def retain(self, block_ids: Sequence[int], tenant: str, until_s: float) -> None:
        """Retains blocks of a block table that the cache holds, for the tenant and until then. Where the tenant may not
        have so many, the first ones are retained."""
        for block_id in reversed(block_ids):
            given_up = self._retention.retain(block_id, tenant, until_s)
            self._settle([block_id, *given_up])

    def deadline_s(self, block_id: int) -> float | None:
        """Returns until when the block is retained; None if it is not."""
        return self._retention.deadline_s(block_id)

    def expire(self, now_s: float) -> None:
        """Retains blocks no longer whose deadlines have passed."""
        self._settle(self._retention.expire(now_s))

    def drop(self, block_ids: Sequence[int]) -> None:
        """Has the cache forget blocks; those that no table counts become free."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._cached_in(block_id)[block_id]
                self._free.append(block_id)
            self._cache.forget(block_id)
            self._retention.forget(block_id)

    def clear_cache(self) -> None:
        """Makes the cached blocks free and has the cache forget all; held blocks stay held."""
        self._cache.clear()
        self._retention.clear()
        for blocks in (self._cached, self._cached_retained):
            self._free.extend(blocks)
            blocks.clear()

    def _take(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = (self._cached or self._cached_retained).popitem(last=False)
            self._cache.forget(block_id)
            self._retention.forget(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def _settle(self, block_ids: Sequence[int]) -> None:
        """Moves cached blocks that were or are retained to where they belong, as the most recently used ones."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._cached.pop(block_id, None)
                self._cached_retained.pop(block_id, None)
                self._cached_in(block_id)[block_id] = None

    def _cached_in(self, block_id: int) -> OrderedDict[int, None]:
        """Returns where the block is, or goes, while it is cached."""
        return self._cached_retained if block_id in self._retention else self._cached
