"""What tenants ask of the prefix cache: to retain prompts, to see what is cached, to drop it; torch-free."""

from collections.abc import Callable, Sequence

from engine.core.cache_steering import CachedPrefixes
from engine.core.request import Request
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.cache_keys import CacheKeys, KeyUse
from engine.scheduling.prefix_cache import BlockCache

_USES_PER_BLOCK = 4  # of the pool, whose keys are remembered: blocks have several keys, or are in the KV store
_MIN_USES = 1 << 14

CountStored = Callable[[Sequence[bytes]], int]
"""Returns how many of these blocks are in the KV store."""


class PrefixSteering:
    """Follows the requests that end, and answers for their tenants' keys."""

    def __init__(self, pool: BlockPool, cache: BlockCache, block_size: int) -> None:
        self._pool = pool
        self._cache = cache
        self._block_size = block_size
        self._keys = CacheKeys(max(_USES_PER_BLOCK * pool.num_blocks, _MIN_USES))

    def used(self, request: Request, now_s: float) -> None:
        """Records the blocks of a request that is about to give them up, and retains those of its prompt if it asks for
        that."""
        steering = request.asked.steering
        computed = request.block_hashes[: request.num_computed_tokens // self._block_size]
        self._keys.use(request.asked.tenant, steering.key, computed, now_s)
        if steering.retain_s > 0:
            of_prompt = computed[: len(request.asked.prompt_token_ids) // self._block_size]
            self._pool.retain(self._in_all_groups(of_prompt), request.asked.tenant, now_s + steering.retain_s)

    def cached(self, tenant: str, now_s: float, count_stored: CountStored) -> list[CachedPrefixes]:
        """Returns what is cached of the tenant's keys, without those of which nothing is."""
        self._pool.expire(now_s)
        found = (self._cached(key, use, now_s, count_stored) for key, use in self._keys.uses_of(tenant))
        return [each for each in found if each.num_tokens > 0]

    def drop(self, tenant: str, key: str | None) -> list[bytes]:
        """Drops from memory what is cached under a key, or under all keys of the tenant, and under no other. Returns
        the hashes of the blocks, of which others may be in the KV store."""
        hashes = self._keys.forget(tenant, key)
        self._pool.drop(self._in_all_groups(hashes))
        return hashes

    def _cached(self, key: str, use: KeyUse, now_s: float, count_stored: CountStored) -> CachedPrefixes:
        hashes = list(use.block_hashes)
        in_memory = [blocks for each in hashes if (blocks := self._cache.whole(each))]
        absent = [each for each in hashes if not self._cache.whole(each)]
        deadlines = [each for blocks in in_memory if (each := self._deadline_s(blocks)) is not None]
        return CachedPrefixes(
            key=key,
            num_tokens=(len(in_memory) + count_stored(absent)) * self._block_size,
            num_memory_tokens=len(in_memory) * self._block_size,
            num_stored_tokens=count_stored(hashes) * self._block_size,
            num_retained_tokens=len(deadlines) * self._block_size,
            idle_s=now_s - use.used_s,
            retained_s=max(deadlines, default=now_s) - now_s,
        )

    def _deadline_s(self, block_ids: Sequence[int]) -> float | None:
        """Returns until when all of these blocks are retained; None if one of them is not."""
        deadlines = [each for block_id in block_ids if (each := self._pool.deadline_s(block_id)) is not None]
        return min(deadlines) if len(deadlines) == len(block_ids) else None

    def _in_all_groups(self, block_hashes: Sequence[bytes]) -> list[int]:
        return [block_id for each in block_hashes for block_id in self._cache.blocks_of(each)]


class NoPrefixSteering:
    """Follows nothing, where nobody retains, sees or drops anything: requests of a simulation have no keys."""

    def used(self, request: Request, now_s: float) -> None:
        pass

    def cached(self, tenant: str, now_s: float, count_stored: CountStored) -> list[CachedPrefixes]:
        return []

    def drop(self, tenant: str, key: str | None) -> list[bytes]:
        return []
