"""Who is let in, and when one that is not should come back. On the server's side: it refuses before the engine hears.

Predicted wait of a new request, the longer of two:
- for a slot: its place behind those that run, times the seconds between two ends, measured while all slots were taken;
- for prefill: the prompt tokens before it, at the rate measured while more of them waited than one step computes.

Tenants take turns (`fair_queue`), so before a tenant's request are not more than its own that wait, and as many of the
others as have their turns meanwhile; tenants that come later are not predicted. Places and tokens are kept for each:
see `room_shares`.

The sequences of one request come together, and only the first one's wait counts. The others mostly wait for each other:
refused for that, they would be refused on an idle server, too, whenever they came again.

What was not measured yet is not predicted: a cold server lets in as many as its bounds on requests and tokens allow.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from engine.client.interface import SOLE_TENANT, GenerationRequest, Tenant
from engine.client.tenant_quotas import TenantQuotas
from engine.client.throughput_meter import ThroughputMeter
from engine.core.errors import OverloadedError
from engine.core.stats import QueueStats

_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_NUM_DEVIATIONS = 3  # of the time that so many ends take which come at random (the deviation of n is sqrt(n))
_PREFILL_MARGIN = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """What may wait."""

    max_waiting: int = 256
    """Requests beside those that run."""
    max_waiting_tokens: int = 1_000_000
    """Prompt tokens of requests without a first token. One that comes while none wait may have more."""
    max_queue_s: float = 60.0
    """Longest wait to be scheduled, predicted and real."""


class Place:
    """One request's place, from admission to its end."""

    def __init__(self, room: "AdmissionControl", tenant: Tenant, num_tokens: int) -> None:
        self._room = room
        self._tenant = tenant
        self._num_tokens = num_tokens
        self._has_begun = False

    def begin(self) -> None:
        """Its prompt is computed. Idempotent."""
        if not self._has_begun:
            self._has_begun = True
            self._room._begin(self._tenant, self._num_tokens)

    def leave(self) -> None:
        """Once, at its end."""
        self._room._leave(self._tenant, self._num_tokens, self._has_begun)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What is before a new request."""

    num_ends: int
    """Requests that must end before it can run."""
    num_tokens: int
    """Prompt tokens to compute."""


class AdmissionControl:
    """Bounds requests, prompt tokens and predicted wait. A tenant's that are refused one after the other are told
    different times, so that they do not all come back at once.
    """

    def __init__(
        self, limits: AdmissionLimits, num_slots: int, batch_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`num_slots` requests run at once. Of prompts, one step computes `batch_tokens`: fewer need not wait."""
        self._limits = limits
        self._num_slots = num_slots
        self._batch_tokens = batch_tokens
        self._held = TenantQuotas()
        self._standing: dict[Tenant, tuple[str, float]] = {}  # refusals: they stand until the room changes
        self._num_refused = Counter[str]()  # by tenant, of whom there are few: since it last found a place
        self._ends = ThroughputMeter(max(16, 4 * num_slots), clock)
        self._prompts = ThroughputMeter(64, clock)

    @property
    def stats(self) -> QueueStats:
        return QueueStats(self._held.num_places, self._held.num_tokens, self.predicted_wait_s)

    @property
    def predicted_wait_s(self) -> float:
        """From now until one more request would be scheduled, behind all that are inside."""
        return self._wait_s(self._all_ahead)

    def queue_limit_s(self, max_queue_s: float | None) -> float:
        """How long a request may wait that asks for `max_queue_s`."""
        return self._limits.max_queue_s if max_queue_s is None else min(max_queue_s, self._limits.max_queue_s)

    def check(self, max_queue_s: float | None = None, tenant: Tenant = SOLE_TENANT) -> None:
        """Raise OverloadedError if even the smallest request found no place that it gets within `max_queue_s`."""
        # A refusal stands until somebody enters, begins or leaves: to check anew for each of the many who ask would
        # cost the streams time, and nobody is given a place that was refused to one before.
        if tenant in self._standing:
            raise self._refusal(tenant, *self._standing[tenant])
        self._check_size(1, tenant)
        limit_s, ahead = self.queue_limit_s(max_queue_s), self._ahead_of(tenant)
        excess_s = self._excess_s(ahead, limit_s)
        if excess_s > 0:
            waits = f"about {self._wait_s(ahead):.1f} s, perhaps {self._cautious_wait_s(ahead):.1f} s"
            reason = f"A new request would wait {waits}, and must not wait over {limit_s:g} s"
            if max_queue_s is None:
                self._standing[tenant] = reason, excess_s
            raise self._refusal(tenant, reason, excess_s)

    def forget_jam(self) -> None:
        """Another engine process goes on: how long the one before held everything up says nothing of this one."""
        self._ends.forget_jam()
        self._prompts.forget_jam()
        self._standing.clear()

    def let_in(self, request: GenerationRequest) -> Place:
        """Take a place on the request's terms. Raises OverloadedError."""
        num_tokens = len(request.prompt_token_ids)
        if request.is_sibling:
            return self._take(num_tokens, request.who)
        return self.enter(num_tokens, request.patience_s, request.who)

    def enter(self, num_tokens: int, max_queue_s: float | None = None, tenant: Tenant = SOLE_TENANT) -> Place:
        """Take a place for a prompt of so many tokens. Raises OverloadedError."""
        self.check(max_queue_s, tenant)
        return self._take(num_tokens, tenant)

    def _take(self, num_tokens: int, tenant: Tenant) -> Place:
        self._check_size(num_tokens, tenant)
        self._num_refused.pop(tenant.name, None)
        self._held.enter(tenant, num_tokens)
        self._on_change()
        return Place(self, tenant, num_tokens)

    def _check_size(self, num_tokens: int, tenant: Tenant) -> None:
        held, limits = self._held, self._limits
        num_places = self._num_slots + limits.max_waiting
        if held.num_places >= num_places:
            raise self._refusal(tenant, f"All {num_places} places are taken by running and waiting requests")
        if not held.has_place(tenant, self._num_slots, limits.max_waiting):
            raise self._refusal(tenant, f"Those of the {num_places} places that are free are kept for other API keys")
        if held.num_tokens and not held.has_tokens(tenant, num_tokens, limits.max_waiting_tokens):
            num_over = held.num_tokens + num_tokens - limits.max_waiting_tokens
            at_most = f"at most {limits.max_waiting_tokens} may" if num_over > 0 else "the rest is for other API keys"
            reason = f"{held.num_tokens} prompt tokens are waiting; {at_most}"
            raise self._refusal(tenant, reason, max(0, num_over) * self._seconds_per_token)

    def _refusal(self, tenant: Tenant, reason: str, excess_s: float = 0.0) -> OverloadedError:
        """`excess_s` until it would be let in; where that depends on a place only, until the next one ends."""
        retry_after_s = max(excess_s, self._seconds_per_end) + self._num_refused[tenant.name] * self._seconds_per_end
        self._num_refused[tenant.name] += 1
        return OverloadedError(f"{reason}; try again later.", min(max(retry_after_s, _MIN_RETRY_S), _MAX_RETRY_S))

    def _begin(self, tenant: Tenant, num_tokens: int) -> None:
        self._prompts.add(num_tokens)
        self._held.begin(tenant, num_tokens)
        self._on_change()

    def _leave(self, tenant: Tenant, num_tokens: int, has_begun: bool) -> None:
        self._ends.add(1)
        if not has_begun:
            self._held.begin(tenant, num_tokens)
        self._held.leave(tenant)
        self._on_change()

    def _on_change(self) -> None:
        self._standing.clear()
        is_full = self._held.num_places >= self._num_slots
        self._ends.run(is_full)
        # While all slots are taken prompts are held up by that, which is not the speed of prefill.
        self._prompts.run(self._held.num_tokens > self._batch_tokens and not is_full)

    @property
    def _all_ahead(self) -> "_Ahead":
        return _Ahead(max(0, self._held.num_places + 1 - self._num_slots), self._held.num_tokens)

    def _ahead_of(self, tenant: Tenant) -> "_Ahead":
        ahead, turn_share = self._all_ahead, self._held.turn_share(tenant)
        if turn_share == 1:
            return ahead
        own = self._held.of(tenant)
        num_ends, num_tokens = math.ceil((own.num_waiting + 1) / turn_share), math.ceil(own.num_tokens / turn_share)
        return _Ahead(min(ahead.num_ends, num_ends), min(ahead.num_tokens, num_tokens))

    def _wait_s(self, ahead: "_Ahead") -> float:
        return max(ahead.num_ends * self._seconds_per_end, self._wait_for_prefill_s(ahead))

    def _cautious_wait_s(self, ahead: "_Ahead") -> float:
        """Hardly anyone waits longer. An overloaded room is always as full as it may be: all that are let in would wait
        as long as is predicted, and without a margin half of them longer.
        """
        num_ends = ahead.num_ends + _NUM_DEVIATIONS * math.sqrt(ahead.num_ends)
        return max(num_ends * self._seconds_per_end, _PREFILL_MARGIN * self._wait_for_prefill_s(ahead))

    def _excess_s(self, ahead: "_Ahead", limit_s: float) -> float:
        """Until so much less is ahead that the cautious wait is at most `limit_s`; not above 0 if it is now."""
        num_ends = ahead.num_ends
        if self._seconds_per_end:
            root = math.sqrt(_NUM_DEVIATIONS**2 / 4 + limit_s / self._seconds_per_end) - _NUM_DEVIATIONS / 2
            num_ends -= math.floor(root**2)  # root^2 + _NUM_DEVIATIONS * root = limit_s / seconds_per_end
        prefill_s = self._wait_for_prefill_s(ahead) - limit_s / _PREFILL_MARGIN
        return max(num_ends * self._seconds_per_end, prefill_s)

    def _wait_for_prefill_s(self, ahead: "_Ahead") -> float:
        return ahead.num_tokens * self._seconds_per_token if ahead.num_tokens > self._batch_tokens else 0.0

    @property
    def _seconds_per_end(self) -> float:
        """Until as many have ended as there are slots, as if all that run would end just now."""
        return self._ends.measured_s / max(self._ends.total, self._num_slots)

    @property
    def _seconds_per_token(self) -> float:
        return self._prompts.measured_s / self._prompts.total if self._prompts.total else 0.0
