"""Admission control: which requests are admitted, and when a refused one should come back. It is on the server's side,
so that the engine never sees a refused request.

Predicted wait of a new request, the longer of two:
- for a slot: its place behind those that run, times the seconds between two ends, measured while all slots were taken;
- for prefill: the prompt tokens before it, at the rate measured while more of them waited than one step computes.

Tenants take turns (see `fair_queue`), so before a tenant's request come only its own that wait, and as many of the
others as have their turns meanwhile; tenants that come later are not predicted. Each tenant has a quota of places and
tokens: see `tenant_quotas`.

The sequences of one request come together, and only the first one's wait counts. The others mostly wait for each other:
refused for that, they would be refused on an idle server, too, whenever they came again.

What was not measured yet is not predicted: a cold server admits as many as its bounds on requests and tokens allow.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from engine.client.tenant_quotas import TenantQuotas
from engine.client.throughput_meter import ThroughputMeter
from engine.core.errors import OverloadedError
from engine.core.generation_request import SOLE_TENANT, GenerationRequest, Tenant
from engine.core.stats import QueueStats

_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_NUM_DEVIATIONS = 3  # of the number of requests that end at random in a given time (that of n is sqrt(n))
_PREFILL_MARGIN = 1.25
_MAX_REFUSED = 4096  # tenants whose refusals are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """How much may wait, and for how long."""

    max_waiting: int = 256
    """Requests beside those that run."""
    max_waiting_tokens: int = 1_000_000
    """Prompt tokens of all requests without a first token. A request that comes while none wait may have more."""
    max_queue_s: float = 60.0
    """Longest wait to be scheduled, predicted and real."""


class Place:
    """One request's place among those admitted, from its admission to its end."""

    def __init__(self, admission: "AdmissionControl", tenant: Tenant, num_tokens: int) -> None:
        self._admission = admission
        self._tenant = tenant
        self._num_tokens = num_tokens
        self._has_begun = False

    def begin(self) -> None:
        """Stop counting the request's prompt tokens, which are computed. Idempotent."""
        if not self._has_begun:
            self._has_begun = True
            self._admission._begin(self._tenant, self._num_tokens)

    def leave(self) -> None:
        """Give the place up. Call once, at the request's end."""
        self._admission._leave(self._tenant, self._num_tokens, self._has_begun)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """The work that comes before a new request."""

    num_ends: int
    """Requests that must end before the new one can run."""
    num_tokens: int
    """Prompt tokens to compute before those of the new request."""


class AdmissionControl:
    """Bounds requests, prompt tokens and predicted wait. Requests of a tenant that are refused one after the other get
    increasing `Retry-After` times, so that they do not all come back at once.
    """

    def __init__(
        self, limits: AdmissionLimits, num_slots: int, batch_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`num_slots` requests run at once, and one step computes `batch_tokens` of prompts: fewer need not wait."""
        self._limits = limits
        self._num_slots = num_slots
        self._batch_tokens = batch_tokens
        self._held = TenantQuotas()
        self._standing: dict[Tenant, tuple[str, float]] = {}  # refusals, which stand until the next `_on_change`
        self._num_refused = Counter[str]()  # by tenant: since its last admission
        self._ends = ThroughputMeter(max(16, 4 * num_slots), clock)
        self._prompts = ThroughputMeter(64, clock)

    @property
    def stats(self) -> QueueStats:
        return QueueStats(self._held.num_places, self._held.num_tokens, self.predicted_wait_s)

    @property
    def predicted_wait_s(self) -> float:
        """Seconds until one more request would be scheduled behind all that are admitted."""
        return self._wait_s(self._all_ahead)

    def queue_limit_s(self, max_queue_s: float | None) -> float:
        """Returns how long a request that asks for `max_queue_s` may wait to be scheduled."""
        return self._limits.max_queue_s if max_queue_s is None else min(max_queue_s, self._limits.max_queue_s)

    def check(self, max_queue_s: float | None = None, tenant: Tenant = SOLE_TENANT) -> None:
        """Raise OverloadedError if even the smallest request would find no place, or not run within `max_queue_s`."""
        # A refusal stands until a request enters, begins or leaves: to check anew for each of many refused requests
        # would take time from the streams, and no request gets a place that an earlier one was refused.
        if tenant in self._standing:
            raise self._refusal(tenant, *self._standing[tenant])
        self._check_size(1, tenant)
        limit_s, ahead = self.queue_limit_s(max_queue_s), self._ahead_of(tenant)
        excess_s = self._excess_s(ahead, limit_s)
        if excess_s > 0:
            waits = f"about {self._wait_s(ahead):.1f} s, perhaps {self._cautious_wait_s(ahead):.1f} s"
            reason = f"A new request would wait {waits}, and must not wait over {round(limit_s, 3):g} s"
            if max_queue_s is None:
                self._standing[tenant] = reason, excess_s
            raise self._refusal(tenant, reason, excess_s)

    def forget_stall(self) -> None:
        """Forget how long the engine has been stalled. Call when another engine process takes over: the stall of its
        predecessor tells nothing about its speed."""
        self._ends.forget_stall()
        self._prompts.forget_stall()
        self._standing.clear()

    def admit(self, request: GenerationRequest) -> Place:
        """Take a place for the request within its own limits. Raises OverloadedError."""
        num_tokens = len(request.prompt_token_ids)
        if request.is_sibling:
            return self._take(num_tokens, request.quota_tenant)
        return self.enter(num_tokens, request.patience_s, request.quota_tenant)

    def enter(self, num_tokens: int, max_queue_s: float | None = None, tenant: Tenant = SOLE_TENANT) -> Place:
        """Take a place for a prompt of `num_tokens`. Raises OverloadedError."""
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
            raise self._refusal(tenant, f"Those of the {num_places} places that are free are kept for others")
        if held.num_tokens and not held.has_tokens(tenant, num_tokens, limits.max_waiting_tokens):
            num_over = held.num_tokens + num_tokens - limits.max_waiting_tokens
            at_most = f"at most {limits.max_waiting_tokens} may" if num_over > 0 else "the rest is for others"
            reason = f"{held.num_tokens} prompt tokens are waiting; {at_most}"
            raise self._refusal(tenant, reason, max(0, num_over) * self._seconds_per_token)

    def _refusal(self, tenant: Tenant, reason: str, excess_s: float = 0.0) -> OverloadedError:
        """Returns the error for a request that would be admitted in `excess_s`; without those, when the next request
        ends."""
        retry_after_s = max(excess_s, self._seconds_per_end) + self._num_refused[tenant.name] * self._seconds_per_end
        if len(self._num_refused) > _MAX_REFUSED:  # addresses may be many
            self._num_refused.clear()
            self._standing.clear()
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
        """Returns seconds that hardly any request waits for longer. Under overload the queue is always as long as it
        may be: all that are admitted would wait as long as is predicted, and without a margin half of them longer.
        """
        num_ends = ahead.num_ends + _NUM_DEVIATIONS * math.sqrt(ahead.num_ends)
        return max(num_ends * self._seconds_per_end, _PREFILL_MARGIN * self._wait_for_prefill_s(ahead))

    def _excess_s(self, ahead: "_Ahead", limit_s: float) -> float:
        """Returns the seconds until the cautious wait is at most `limit_s`; not above 0 if it is now."""
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
        """Measured seconds from one request's end to the next. Until as many have ended as there are slots, all that
        run are taken to end just now."""
        return self._ends.measured_s / max(self._ends.total, self._num_slots)

    @property
    def _seconds_per_token(self) -> float:
        return self._prompts.measured_s / self._prompts.total if self._prompts.total else 0.0
