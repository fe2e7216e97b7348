"""Tenant quotas: which places and waiting tokens each tenant holds, and what is kept for it; torch-free.

Half of the waiting places is kept for the tenants, for each its part by its share, and so is half of the tokens. The
rest, and as many places as requests run, is first come, first served:

    size = parts of all tenants + the rest,    what tenants have beyond their parts <= the rest

So a tenant that has less than its part is admitted, whatever the others ask for, and one that is alone can have all
that run at once. With a single tenant, this is a plain bound.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.core.generation_request import Tenant


@dataclass(slots=True)
class Holding:
    """What one tenant holds."""

    share: float
    num_places: int = 0
    num_waiting: int = 0
    """Places of requests whose prompts are not computed yet."""
    num_tokens: int = 0
    """Tokens of these prompts."""


class TenantQuotas:
    """The holdings of all tenants with admitted requests."""

    def __init__(self) -> None:
        self._holdings: dict[str, Holding] = {}  # none without a place
        self.num_places = 0
        self.num_tokens = 0

    def of(self, tenant: Tenant) -> Holding:
        """Returns the tenant's holding, which the caller must not change."""
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
        """Count one of the tenant's prompts as computed."""
        holding = self._holdings[tenant.name]
        holding.num_waiting -= 1
        holding.num_tokens -= num_tokens
        self.num_tokens -= num_tokens

    def leave(self, tenant: Tenant) -> None:
        """Free the place of one of the tenant's requests, whose prompt no longer counts."""
        holding = self._holdings[tenant.name]
        holding.num_places -= 1
        self.num_places -= 1
        if not holding.num_places:
            del self._holdings[tenant.name]

    def has_place(self, tenant: Tenant, num_slots: int, max_waiting: int) -> bool:
        """Returns whether the tenant may take one of the places, which are `num_slots` to run and `max_waiting` to
        wait."""
        others = ((each.num_places, each.share) for each in self._others(tenant))
        kept = max_waiting // 2
        return fits(self.of(tenant).num_places + 1, tenant.share, others, kept, num_slots + max_waiting - kept)

    def has_tokens(self, tenant: Tenant, num_tokens: int, size: int) -> bool:
        """Returns whether the tenant may take `num_tokens` of the `size` prompt tokens that may wait."""
        others = ((each.num_tokens, each.share) for each in self._others(tenant))
        kept = size // 2
        return fits(self.of(tenant).num_tokens + num_tokens, tenant.share, others, kept, size - kept)

    def turn_share(self, tenant: Tenant) -> float:
        """Returns the tenant's share of the turns among the tenants with admitted requests; 1 for one that is alone."""
        return tenant.share / (tenant.share + sum(each.share for each in self._others(tenant)))

    def _others(self, tenant: Tenant) -> Iterable[Holding]:
        return (holding for name, holding in self._holdings.items() if name != tenant.name)


def max_tenant_places(share: float, num_slots: int, max_waiting: int) -> int:
    """Returns how many places a tenant gets that is alone."""
    kept = max_waiting // 2
    return num_slots + max_waiting - kept + min(kept, _part(kept, share))


def max_tenant_tokens(share: float, size: int) -> int:
    """Returns how many prompt tokens may wait for a tenant that is alone; a single request may have more."""
    return max_tenant_places(share, 0, size)


def _part(kept: int, share: float) -> int:
    """Returns the part of `kept` by share, at least 1, so that with very many tenants a few may still come."""
    return max(1, math.floor(kept * share))


def fits(amount: int, share: float, others: Iterable[tuple[int, float]], kept: int, rest: int) -> bool:
    """Returns whether a tenant of this share may have the amount beside what others have, each with its share, where
    `kept` is kept for all by their shares, and the rest is for whoever comes first."""
    own = max(0, amount - _part(kept, share))
    return own == 0 or own + sum(max(0, amount - _part(kept, share)) for amount, share in others) <= rest
