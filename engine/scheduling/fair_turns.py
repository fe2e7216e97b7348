"""Taking turns: which running request gives up its place when another one waits; torch-free.

Without turns a tenant whose requests run for minutes would hold every place, or all blocks, for as long. A preempted
request goes on later with the same tokens, and mostly with the KV that it had: so a turn costs little. Who is behind is
known by the counts of `FairQueue`. For a new request of a tenant that has no place, any less is enough: who asks for
little does not wait. A tenant keeps what its weight entitles it to, of places and of blocks, so one that asks for
little is never preempted for others.

A request whose reader has stopped reading needs no tokens now: it gives up its place first, to anybody who waits, and
gets one only while no other waits.
"""

from collections.abc import Sequence

from engine.core.request import Request
from engine.scheduling.fair_queue import FairQueue, has_begun

_SHORTEST_TURN = 16  # tokens that a request generates at least before it gives up its place


class FairTurns:
    """Chooses who gives up places and blocks."""

    def __init__(self, queue: FairQueue, max_num_seqs: int, num_blocks: int) -> None:
        self._queue = queue
        self._max_num_seqs = max_num_seqs
        self._num_blocks = num_blocks

    def victim(self, waiting: Request, running: Sequence[Request]) -> Request | None:
        """Returns the running request that gives up its place and blocks for a waiting one: a stalled one, or else the
        newest of the tenant that was served most. None if all have had too little for that."""
        if waiting.is_stalled:
            return None
        if stalled := [request for request in running if request.is_stalled and not request.needs_prefill]:
            return self.first_to_go(stalled)
        if not self._queue.has_several_tenants:
            return None
        is_first = not has_begun(waiting) and all(request.asked.tenant != waiting.asked.tenant for request in running)
        weights = {request.asked.tenant: request.asked.weight for request in (*self._queue.heads, *running)}
        above = {tenant for tenant in weights if self._is_above_its_share(tenant, weights, running)}
        above.discard(waiting.asked.tenant)
        candidates = [
            request
            for request in running
            if request.asked.tenant in above
            and _has_had_its_turn(request)
            and self._queue.is_behind(waiting, request, at_once=is_first)
        ]
        return self.first_to_go(candidates) if candidates else None

    def first_to_go(self, running: Sequence[Request]) -> Request:
        """Returns the running request whose blocks are given up first: a stalled one, and of the tenant that was
        served most, the newest."""
        return max(running, key=lambda each: (each.is_stalled, self._queue.served(each), each.order))

    def _is_above_its_share(self, tenant: str, weights: dict[str, float], running: Sequence[Request]) -> bool:
        """Whether the tenant holds more than its weight's part of the places or of the blocks."""
        share = weights[tenant] / sum(weights.values())
        own = [request.num_blocks for request in running if request.asked.tenant == tenant]
        return len(own) > share * self._max_num_seqs or sum(own) > share * self._num_blocks


def _has_had_its_turn(request: Request) -> bool:
    """Whether the request has generated enough since it last got its place. One that is being prefilled has not."""
    return not request.needs_prefill and len(request.output_token_ids) - request.turn_start >= _SHORTEST_TURN
