"""Which cached blocks make room after all others, for whom, and for how long; torch-free."""

import math
from collections import OrderedDict


class Retention:
    """Blocks that are retained until their deadlines, each for the tenant that asked for it last.

    There are `max_blocks` at most. Where there would be more, the tenant that has most gives up the one that it asked
    for the longest time ago: one that asks for much displaces its own.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._tenant_of: dict[int, str] = {}
        self._deadlines_of: dict[str, OrderedDict[int, float]] = {}  # by tenant and block, longest ago first
        self._earliest_s = math.inf  # no deadline is before

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._tenant_of

    def deadline_s(self, block_id: int) -> float | None:
        """Returns until when the block is retained; None if it is not."""
        tenant = self._tenant_of.get(block_id)
        return None if tenant is None else self._deadlines_of[tenant][block_id]

    def retain(self, block_id: int, tenant: str, until_s: float) -> list[int]:
        """Retains the block until then, or longer if that was asked for before. Returns the blocks that are no longer
        retained for it; it may be one of these."""
        deadline_s = max(until_s, self.deadline_s(block_id) or until_s)
        self.forget(block_id)
        self._tenant_of[block_id] = tenant
        self._deadlines_of.setdefault(tenant, OrderedDict())[block_id] = deadline_s
        self._earliest_s = min(self._earliest_s, deadline_s)
        return [self._give_up_one() for _ in range(len(self) - self._max_blocks)]

    def expire(self, now_s: float) -> list[int]:
        """Returns the blocks whose deadlines have passed, which are no longer retained."""
        if now_s < self._earliest_s:
            return []
        deadlines = [each for of_tenant in self._deadlines_of.values() for each in of_tenant.items()]
        expired = [block_id for block_id, deadline_s in deadlines if deadline_s <= now_s]
        for block_id in expired:
            self.forget(block_id)
        self._earliest_s = min((deadline_s for _, deadline_s in deadlines if deadline_s > now_s), default=math.inf)
        return expired

    def forget(self, block_id: int) -> None:
        """Retains the block no longer, if it is."""
        tenant = self._tenant_of.pop(block_id, None)
        if tenant is not None:
            del self._deadlines_of[tenant][block_id]
            if not self._deadlines_of[tenant]:
                del self._deadlines_of[tenant]

    def clear(self) -> None:
        self._tenant_of.clear()
        self._deadlines_of.clear()

    def _give_up_one(self) -> int:
        tenant = max(self._deadlines_of, key=lambda each: len(self._deadlines_of[each]))
        block_id = next(iter(self._deadlines_of[tenant]))
        self.forget(block_id)
        return block_id
