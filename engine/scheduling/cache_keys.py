"""Under which cache keys of which tenants blocks were used, so that a tenant can see and drop its own; torch-free."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class KeyUse:
    """The blocks that were used under one key."""

    used_s: float
    """When they were, last."""
    block_hashes: dict[bytes, None] = field(default_factory=dict)


class CacheKeys:
    """The newest uses of blocks, at most `max_uses`, where a block that was used under two keys counts twice. Whether a
    block is still anywhere is not known here."""

    def __init__(self, max_uses: int) -> None:
        self._max_uses = max_uses
        self._uses: OrderedDict[tuple[str, str, bytes], None] = OrderedDict()  # longest ago first
        self._of_tenant: dict[str, dict[str, KeyUse]] = {}
        self._num_keys: Counter[bytes] = Counter()

    def use(self, tenant: str, key: str, block_hashes: Sequence[bytes], now_s: float) -> None:
        """Records that blocks of a prompt and its answer were used; of these the first one is forgotten last."""
        if not block_hashes:
            return
        use = self._of_tenant.setdefault(tenant, {}).setdefault(key, KeyUse(now_s))
        use.used_s, known, uses = now_s, use.block_hashes, self._uses
        for block_hash in reversed(block_hashes):
            if block_hash not in known:
                known[block_hash] = None
                self._num_keys[block_hash] += 1
            name = tenant, key, block_hash
            uses[name] = None
            uses.move_to_end(name)
        while len(self._uses) > self._max_uses:
            self._forget(*next(iter(self._uses)))

    def uses_of(self, tenant: str) -> Iterator[tuple[str, KeyUse]]:
        """Yields the tenant's keys. None of their uses may be forgotten meanwhile."""
        yield from self._of_tenant.get(tenant, {}).items()

    def forget(self, tenant: str, key: str | None) -> list[bytes]:
        """Forgets the uses under a key, or under all keys of the tenant. Returns the blocks that were used under no
        other."""
        uses = self._of_tenant.get(tenant, {})
        alone = []
        for each in [key] if key is not None else list(uses):
            for block_hash in list(uses[each].block_hashes) if each in uses else ():
                self._forget(tenant, each, block_hash)
                if block_hash not in self._num_keys:
                    alone.append(block_hash)
        return alone

    def _forget(self, tenant: str, key: str, block_hash: bytes) -> None:
        del self._uses[tenant, key, block_hash]
        self._num_keys[block_hash] -= 1
        if not self._num_keys[block_hash]:
            del self._num_keys[block_hash]
        uses = self._of_tenant[tenant]
        del uses[key].block_hashes[block_hash]
        if not uses[key].block_hashes:
            del uses[key]
        if not uses:
            del self._of_tenant[tenant]
