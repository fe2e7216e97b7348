"""What happened lately, in its order, for `GET /stats/timeline`: the newest steps, seconds and requests."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.core.batch import Phase
from engine.core.stats import StepShare, StepStats

NUM_STEPS, NUM_SECONDS, NUM_REQUESTS, NUM_SHARES = 2000, 300, 500, 10_000
"""How many of the newest are kept; the last are what each step computed of each request."""


class _Step(msgspec.Struct, gc=False):
    """A step that ran, and what it computed of each request; None if that is no longer kept."""

    number: int
    stats: StepStats
    shares: Sequence[StepShare] | None


@dataclass(slots=True)
class _Latencies:
    """Mean and maximum of some times."""

    count: int = 0
    sum_s: float = 0.0
    max_s: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Adds a time, and `count` - 1 of zero."""
        self.count += count
        self.sum_s += seconds
        self.max_s = max(self.max_s, seconds)

    def body(self) -> dict[str, float] | None:
        return {"mean": _ms(self.sum_s / self.count), "max": _ms(self.max_s)} if self.count else None


class _Second:
    """What steps and requests did within one second."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.cursor = 0
        """The timeline's cursor at its newest change."""
        self.tokens = dict.fromkeys(Phase, 0.0)
        self.busy_s = dict.fromkeys(Phase, 0.0)
        self.last: StepStats | None = None
        """The newest step that ended in this second."""
        self.ttft, self.gaps = _Latencies(), _Latencies()

    def body(self) -> dict[str, Any]:
        pool = self.last.pool if self.last else None
        return {
            "start_ms": self.number * 1000,
            "prefill_tokens": round(self.tokens[Phase.PREFILL], 1),
            "decode_tokens": round(self.tokens[Phase.DECODE], 1),
            "prefill_ms": _ms(self.busy_s[Phase.PREFILL]),
            "decode_ms": _ms(self.busy_s[Phase.DECODE]),
            "running": self.last.num_running if self.last else None,
            "waiting": self.last.num_waiting if self.last else None,
            "kv_held_ratio": round(pool.held / (pool.free + pool.held + pool.cached), 4) if pool else None,
            "ttft_ms": self.ttft.body(),
            "itl_ms": self.gaps.body(),
        }


class Timeline:
    """Keeps the newest steps, seconds and requests, and returns what is new since a cursor. Times are milliseconds
    since it was made. Seconds in which nothing happened are left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_s = clock()
        self._cursor = 0
        self._steps = deque[_Step](maxlen=NUM_STEPS)
        self._with_shares = deque[_Step]()
        self._num_shares = 0
        self._seconds: dict[int, _Second] = {}
        self._requests = deque[tuple[int, str, dict[str, Any]]](maxlen=NUM_REQUESTS)

    def add_step(self, stats: StepStats, shares: Sequence[StepShare] = ()) -> None:
        """Adds a step that ran something, and what it computed of each request. Its tokens and time are spread over
        the seconds in which it ran."""
        if stats.phase is None:
            return
        self._keep(_Step(self._next(), stats, shares))
        end_s = stats.end_s - self._start_s
        start_s = end_s - stats.duration_s
        num_tokens = stats.num_tokens if stats.phase is Phase.PREFILL else stats.num_generated
        for number, share in _shares(start_s, end_s):
            second = self._second(number)
            second.tokens[stats.phase] += num_tokens * share
            second.busy_s[stats.phase] += stats.duration_s * share
        self._second(math.floor(end_s)).last = stats

    def _keep(self, step: _Step) -> None:
        """Keeps a step, and forgets what the oldest ones computed where that is more than is kept."""
        self._steps.append(step)
        self._with_shares.append(step)
        self._num_shares += len(step.shares or ())
        while self._num_shares > NUM_SHARES or len(self._with_shares) > NUM_STEPS:
            oldest = self._with_shares.popleft()
            self._num_shares -= len(oldest.shares or ())
            oldest.shares = None

    def add_first_token(self, ttft_s: float, time_s: float) -> None:
        self._second_at(time_s).ttft.add(ttft_s)

    def add_tokens(self, num_tokens: int, gap_s: float | None, time_s: float) -> None:
        """Adds tokens that came together, `gap_s` after the one before them; None for a request's first."""
        if gap_s is not None:
            self._second_at(time_s).gaps.add(gap_s, num_tokens)
        elif num_tokens > 1:
            self._second_at(time_s).gaps.add(0.0, num_tokens - 1)

    def add_request(self, key: str, arrival_s: float, body: dict[str, Any]) -> None:
        """Adds a request that ends now, with what is to be told of it to the API key of this name."""
        times = {"arrival_ms": _ms(arrival_s - self._start_s), "end_ms": _ms(self._clock() - self._start_s)}
        self._requests.append((self._next(), key, times | body))

    def since(self, cursor: int, key: str, tenant: str) -> dict[str, Any]:
        """Returns what is new since the cursor, of requests that ended those of this API key, and of what steps
        computed this tenant's; all, if the cursor is not of this timeline."""
        if cursor > self._cursor:
            cursor = 0
        now_s = self._clock() - self._start_s
        seconds = [self._seconds[number] for number in sorted(self._seconds) if number > now_s - NUM_SECONDS]
        return {
            "cursor": self._cursor,
            "now_ms": _ms(now_s),
            "seconds": [each.body() for each in seconds if each.cursor > cursor],
            "steps": [self._step_body(step, tenant) for step in self._steps if step.number > cursor],
            "requests": [body for number, owner, body in self._requests if number > cursor and owner == key],
        }

    def _next(self) -> int:
        self._cursor += 1
        return self._cursor

    def _second_at(self, time_s: float) -> _Second:
        return self._second(math.floor(time_s - self._start_s))

    def _second(self, number: int) -> _Second:
        """Returns the second of this number, which will be changed."""
        second = self._seconds.get(number)
        if second is None:
            second = self._seconds[number] = _Second(number)
            if len(self._seconds) > NUM_SECONDS:
                del self._seconds[min(self._seconds)]
        second.cursor = self._next()
        return second

    def _step_body(self, step: _Step, tenant: str) -> dict[str, Any]:
        stats, shares = step.stats, step.shares
        own = None if shares is None else [each for each in shares if each.tenant == tenant]
        return {
            "phase": stats.phase,
            "end_ms": _ms(stats.end_s - self._start_s),
            "duration_ms": _ms(stats.duration_s),
            "model_ms": _ms(stats.model_s + stats.drafting_s),
            "floor_ms": None if stats.certain_floor_s is None else _ms(stats.certain_floor_s),
            "bound": stats.bound,
            "requests": stats.num_requests,
            "tokens": stats.num_tokens,
            "generated_tokens": stats.num_generated,
            "kv_held_blocks": stats.pool.held,
            "kv_cached_blocks": stats.pool.cached,
            "kv_free_blocks": stats.pool.free,
            "computed": own and [{"id": one.client_request_id, "start": one.start, "end": one.end} for one in own],
        }


def _shares(start_s: float, end_s: float) -> Iterator[tuple[int, float]]:
    """Yields the seconds in which a time span lies, each with its share of the span. The oldest of a span that is
    longer than what is kept are left out."""
    first, last = math.floor(start_s), math.floor(end_s)
    if first == last:
        yield last, 1.0
        return
    for number in range(max(first, last - NUM_SECONDS + 1), last + 1):
        yield number, (min(end_s, number + 1) - max(start_s, number)) / (end_s - start_s)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
