"""What each tenant has of a waiting room, and what is kept for it there; torch-free.

Half of the places to wait is kept for the tenants, for each its part by its share, and so is half of the tokens. The
rest, and as many places as requests run, is for whoever comes first:

    size = parts of all tenants + the rest,    what tenants have beyond their parts <= the rest

So who has less than its part finds room, whatever the others ask for, and who is alone can have all that run at once.
Where one tenant is all, this is a plain bound.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.client.interface import Tenant


@dataclass(slots=True)
class Holding:
    """What one tenant has."""

    share: float
    num_places: int = 0
    num_waiting: int = 0
    """Places whose prompt is not computed."""
    num_tokens: int = 0
    """Of these prompts."""


class TenantQuotas:
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

    def has_place(self, tenant: Tenant, num_slots: int, max_waiting: int) -> bool:
        """Whether one of so many places to run and to wait is the tenant's to take."""
        others = ((each.num_places, each.share) for each in self._others(tenant))
        kept = max_waiting // 2
        return _fits(self.of(tenant).num_places + 1, tenant.share, others, kept, num_slots + max_waiting - kept)

    def has_tokens(self, tenant: Tenant, num_tokens: int, size: int) -> bool:
        """The same for prompt tokens."""
        others = ((each.num_tokens, each.share) for each in self._others(tenant))
        kept = size // 2
        return _fits(self.of(tenant).num_tokens + num_tokens, tenant.share, others, kept, size - kept)

    def turn_share(self, tenant: Tenant) -> float:
        """The tenant's share of the turns, while these wait. 1 for who is alone."""
        return tenant.share / (tenant.share + sum(each.share for each in self._others(tenant)))

    def _others(self, tenant: Tenant) -> Iterable[Holding]:
        return (holding for name, holding in self._holdings.items() if name != tenant.name)


def most_places(share: float, num_slots: int, max_waiting: int) -> int:
    """A tenant that is alone gets so many."""
    kept = max_waiting // 2
    return num_slots + max_waiting - kept + min(kept, _part(kept, share))


def most_tokens(share: float, size: int) -> int:
    """The same for prompt tokens of several requests; a single one may have more."""
    return most_places(share, 0, size)


def _part(kept: int, share: float) -> int:
    """One at least, so that with very many tenants a few may still come."""
    return max(1, math.floor(kept * share))


def _fits(amount: int, share: float, others: Iterable[tuple[int, float]], kept: int, rest: int) -> bool:
    own = max(0, amount - _part(kept, share))
    return own == 0 or own + sum(max(0, amount - _part(kept, share)) for amount, share in others) <= rest
