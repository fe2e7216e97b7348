"""The queue of waiting requests: tenants share the engine by tokens and weight, and each tenant's own requests go by
priority, then by when they are due; torch-free.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each tenant has a count
of the tokens computed and generated for it, divided by its weight; the tenant with the lowest count goes next. While
two tenants both wait, their counts differ by at most what one request costs, times the requests that run at once. A
tenant that returns after an idle time starts level with the others: idle time earns no credit. With one tenant this is
a plain sorted queue (earliest deadline first). `FairTurns` has running requests make room for a tenant that is behind.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from heapq import nlargest
from operator import itemgetter

from engine.core.request import Request

_MAX_TENANTS = 4096  # whose counts are kept: addresses may be many
_QUANTUM = 256.0  # a tenant is behind another if it had so many tokens of weight 1 less


class FairQueue:
    """The waiting requests of all tenants. Those whose readers have stopped reading come after all others."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Request]] = {}  # by tenant, in their places; never an empty list
        self._served: dict[str, float] = {}  # by tenant: its tokens divided by its weight
        self._level = 0.0  # the count of the tenant served last: where a tenant that returns starts

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def heads(self) -> list[Request]:
        """The next request of each tenant that waits."""
        return [queue[0] for queue in self._waiting.values()]

    @property
    def has_several_tenants(self) -> bool:
        """Whether more than one tenant has ever had a request."""
        return len(self._served) > 1

    def next(self, running: Iterable[Request] = ()) -> Request | None:
        """Returns the request to run next: that of a tenant which is behind one that runs. Else a stream that has
        begun does not wait behind other tenants' new requests, unless its reader has stopped reading; but where others
        of its tenant run, it waits behind that of a tenant that has none and was served less."""
        if len(self._waiting) <= 1:
            return next(iter(self.heads), None)
        running = list(running)
        ahead = max(running, key=self.served, default=None)

        def place(head: Request) -> tuple[bool, bool, bool, float, int]:
            is_behind = ahead is not None and self.is_behind(head, ahead)
            return head.is_stalled, not is_behind, not has_begun(head), self.served(head), head.number

        tenants = {request.asked.tenant for request in running}
        first = min(self.heads, key=place)
        if first.asked.tenant not in tenants or not has_begun(first):
            return first
        others = (each for each in self.heads if each.asked.tenant not in tenants and not each.is_stalled)
        return min((first, *others), key=self.served)

    def is_behind(self, request: Request, other: Request, *, at_once: bool = False) -> bool:
        """Whether the tenant of `request` was served so much less that `other` may have to make room for it; `at_once`
        if any less is enough."""
        return self.served(request) + (0.0 if at_once else _QUANTUM) < self.served(other)

    def goes_before(self, request: Request, others: Iterable[Request]) -> bool:
        """Whether the tenant of `request` was served less than those of all others."""
        return all(self.is_behind(request, each, at_once=True) for each in others)

    def num_before(self, request: Request) -> int:
        """Returns how many waiting requests of the same tenant come before `request`, which waits as well."""
        return bisect_left(self._waiting[request.asked.tenant], _place(request), key=_place)

    def served(self, request: Request) -> float:
        """Returns the virtual token count of the request's tenant."""
        return self._served.get(request.asked.tenant, self._level)

    def add(self, request: Request) -> None:
        if request.asked.tenant not in self._waiting:
            self._served[request.asked.tenant] = max(self.served(request), self._level)
            self._forget_some()
        self.put_back(request)

    def _forget_some(self) -> None:
        """Forgets, where there are too many, the half of the counts that say least: those nearest to the level, or
        below it, where a tenant that returns starts."""
        if len(self._served) > _MAX_TENANTS:
            self._served = dict(nlargest(_MAX_TENANTS // 2, self._served.items(), key=itemgetter(1)))

    def put_back(self, request: Request) -> None:
        """Adds a request that waited elsewhere, which changes nothing for its tenant."""
        insort(self._waiting.setdefault(request.asked.tenant, []), request, key=_place)

    def remove(self, request: Request) -> None:
        """Removes a request that is scheduled, or that ended while it waited."""
        queue = self._waiting[request.asked.tenant]
        queue.remove(request)
        if not queue:
            del self._waiting[request.asked.tenant]

    def set_stalled(self, request: Request, is_stalled: bool) -> None:
        """Notes whether the request's reader has stopped reading, and moves it to its new place if it waits here."""
        is_here = request in self._waiting.get(request.asked.tenant, ())
        if is_here:
            self.remove(request)
        request.is_stalled = is_stalled
        if is_here:
            self.put_back(request)

    def charge(self, request: Request, cost: float) -> None:
        """Counts tokens that were computed or generated for the request, each once, towards its tenant."""
        self._served[request.asked.tenant] = self.served(request) + cost / request.asked.weight

    def start(self, request: Request, cost: float) -> None:
        """Charges a request that runs for the first time, and raises the level to its tenant's count."""
        self._level = max(self._level, self.served(request))
        self.charge(request, cost)


def _place(request: Request) -> tuple[bool, int, float, int]:
    """Returns the sort key in its tenant's queue: the lowest runs first. A stream that has begun goes on before others
    of its priority begin, unless its reader has stopped reading."""
    due_s = -math.inf if has_begun(request) else request.asked.due_s
    return request.is_stalled, request.asked.priority, due_s, request.number


def has_begun(request: Request) -> bool:
    """Whether it is a stream that goes on: it was preempted, or it continues an answer that another engine began."""
    return request.num_preemptions > 0 or bool(request.output_token_ids)
