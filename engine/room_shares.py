"""What each tenant has of a waiting room, and what is kept for it there; torch-free.

Half of the room is kept for the tenants, for each its part by its share. The other half is for whoever comes first:

    size = parts of all tenants + common half,    what tenants have beyond their parts <= common half

So who has less than its part finds room, whatever the others ask for. Where one tenant is all, this is a plain bound.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.client import Tenant


@dataclass(slots=True)
class Holding:
    """What one tenant has."""

    share: float
    num_places: int = 0
    num_waiting: int = 0
    """Places whose prompt is not computed."""
    num_tokens: int = 0
    """Of these prompts."""


class RoomShares:
    """The holdings of the tenants inside."""

    def __init__(self) -> None:
        self._holdings: dict[str, Holding] = {}  # none without a place
        self.num_places = 0
        self.num_tokens = 0

    def of(self, tenant: Tenant) -> Holding:
        """Not to be changed."""
        return self._holdings.get(tenant.name) or Holding(tenant.share)

    def enter(self, tenant: Tenant, num_tokens: int) -> None:
        holding = self._holdings.setdefault(tenant.name, Holding(tenant.share))
        holding.share = tenant.share
        holding.num_places += 1
        holding.num_waiting += 1
        holding.num_tokens += num_tokens
        self.num_places += 1
        self.num_tokens += num_tokens

    def begin(self, tenant: Tenant, num_tokens: int) -> None:
        """One's prompt is computed."""
        holding = self._holdings[tenant.name]
        holding.num_waiting -= 1
        holding.num_tokens -= num_tokens
        self.num_tokens -= num_tokens

    def leave(self, tenant: Tenant) -> None:
        """One that has begun."""
        holding = self._holdings[tenant.name]
        holding.num_places -= 1
        self.num_places -= 1
        if not holding.num_places:
            del self._holdings[tenant.name]

    def has_place(self, tenant: Tenant, size: int) -> bool:
        """Whether one of so many places is the tenant's to take."""
        others = ((each.num_places, each.share) for each in self._others(tenant))
        return _fits(self.of(tenant).num_places + 1, tenant.share, others, size)

    def has_tokens(self, tenant: Tenant, num_tokens: int, size: int) -> bool:
        """The same for prompt tokens."""
        others = ((each.num_tokens, each.share) for each in self._others(tenant))
        return _fits(self.of(tenant).num_tokens + num_tokens, tenant.share, others, size)

    def turn_share(self, tenant: Tenant) -> float:
        """The tenant's share of the turns, while these wait. 1 for who is alone."""
        return tenant.share / (tenant.share + sum(each.share for each in self._others(tenant)))

    def _others(self, tenant: Tenant) -> Iterable[Holding]:
        return (holding for name, holding in self._holdings.items() if name != tenant.name)


def _fits(amount: int, share: float, others: Iterable[tuple[int, float]], size: int) -> bool:
    kept = size // 2

    def beyond(amount: int, share: float) -> int:
        """A tenant's part is one at least, so that with very many tenants a few may still come."""
        return max(0, amount - max(1, math.floor(kept * share)))

    own = beyond(amount, share)
    return own == 0 or own + sum(beyond(*each) for each in others) <= size - kept
