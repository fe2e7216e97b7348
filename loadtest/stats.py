"""Statistics of records, in bounded memory. Latencies are in milliseconds, spans of time in seconds."""

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.record import Outcome, Record

_MAX_EXAMPLES = 5  # distinct error messages kept


@dataclass(frozen=True)
class Distribution:
    """Summary statistics of a sample."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Returns a percentile of a non-empty ascending sequence, interpolated linearly between the closest ranks."""
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


class Sample:
    """A sample of values. Count, mean and extremes are exact, percentiles up to `capacity` values.

    Beyond that percentiles are those of a uniform reservoir (Vitter's algorithm R), so memory stays bounded.
    """

    def __init__(self, capacity: int = 200_000) -> None:
        self.values = array("d")
        self._capacity = capacity
        self._random = random.Random(0)
        self._count = 0
        self._sum = 0.0
        self._min = float("inf")
        self._max = float("-inf")

    def add(self, value: float | None) -> None:
        """Adds a value; None is ignored."""
        if value is None:
            return
        self._count += 1
        self._sum += value
        self._min = min(self._min, value)
        self._max = max(self._max, value)
        if len(self.values) < self._capacity:
            self.values.append(value)
        elif (slot := self._random.randrange(self._count)) < self._capacity:
            self.values[slot] = value

    def distribution(self) -> Distribution | None:
        """Returns the statistics; None for an empty sample."""
        if not self._count:
            return None
        ordered = sorted(self.values)
        p50, p90, p95, p99 = (percentile(ordered, percent) for percent in (50, 90, 95, 99))
        return Distribution(self._count, self._sum / self._count, p50, p90, p95, p99, self._min, self._max)


@dataclass(frozen=True)
class Targets:
    """Latency targets of goodput, in milliseconds: limits within which a request counts as good; None for no limit."""

    ttft_ms: float | None = None
    itl_ms: float | None = None  # of the 99th percentile of a request's own gaps
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by the latency's name."""
        limits = {"ttft": self.ttft_ms, "itl": self.itl_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}
        return {name: limit for name, limit in limits.items() if limit is not None}

    @property
    def is_set(self) -> bool:
        return bool(self.limits)

    def met_by(self, record: Record) -> set[str]:
        """Returns the latencies that are within their limits: none of a request that is not OK. What a request does not
        have, as a single token has no gaps, is within every limit."""
        reply = record.reply
        if reply.outcome is not Outcome.OK:
            return set()
        gaps = sorted(reply.itl_s)
        itl_s = percentile(gaps, 99) if gaps else None
        found = {"ttft": reply.ttft_s, "itl": itl_s, "tpot": reply.tpot_s, "e2e": reply.e2e_s}
        return {name for name, limit_ms in self.limits.items() if (found[name] or 0.0) * 1000 <= limit_ms}

    def are_met_by(self, record: Record) -> bool:
        """Whether the request is OK and within all limits."""
        return record.reply.outcome is Outcome.OK and len(self.met_by(record)) == len(self.limits)


class Summary:
    """Statistics of the records of one group. Latencies are of OK requests only."""

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self.outcomes: Counter[Outcome] = Counter()
        self.statuses: Counter[int] = Counter()  # of the requests refused with an HTTP status, 429 included
        self.examples: Counter[str] = Counter()  # error messages
        self.ttft_ms, self.itl_ms, self.tpot_ms, self.e2e_ms = Sample(), Sample(), Sample(), Sample()
        self.connect_ms, self.send_lag_ms = Sample(), Sample()
        self.prompt_tokens = self.completion_tokens = self.cached_prompt_tokens = 0
        self.num_without_usage = 0  # OK requests without `usage`
        self.num_other_prompt = 0  # OK requests whose prompt has another length in the server's count than was sent
        self.num_other_length = 0  # OK requests with more or fewer tokens than asked for
        self.num_coalesced = 0  # chunks that came in the same read as the one before, so with a gap of zero
        self.num_good = 0
        self.met: Counter[str] = Counter()  # requests within each target, by the latency's name
        self.num_retries = 0
        self.retry_wait_s = 0.0
        self.busy_s = 0.0  # sum over the runs of the span from the first request's start to the last one's end
        self._run_began_s: float | None = None
        self._run_ended_s = 0.0

    @property
    def num_requests(self) -> int:
        return self.outcomes.total()

    @property
    def num_ok(self) -> int:
        return self.outcomes[Outcome.OK]

    @property
    def good_fraction(self) -> float | None:
        """Good requests as a share of all requests, failed and rejected ones included."""
        return self.num_good / self.num_requests if self.num_requests else None

    def add(self, record: Record) -> None:
        reply = record.reply
        self.outcomes[reply.outcome] += 1
        self.num_retries += record.num_retries
        self.retry_wait_s += record.retry_wait_s
        if record.send_lag_s is not None:
            self.send_lag_ms.add(record.send_lag_s * 1000)
        self._run_began_s = min(record.began_s, record.began_s if self._run_began_s is None else self._run_began_s)
        self._run_ended_s = max(self._run_ended_s, reply.ended_s)
        if self.targets.is_set:
            self.num_good += self.targets.are_met_by(record)
            self.met.update(self.targets.met_by(record))
        if reply.outcome is Outcome.OK:
            self._add_ok(record)
        else:
            self._add_failure(record)

    def end_run(self) -> None:
        """Ends the time span of a run; the records of the next run begin a new one."""
        if self._run_began_s is not None:
            self.busy_s += self._run_ended_s - self._run_began_s
        self._run_began_s, self._run_ended_s = None, 0.0

    def _add_ok(self, record: Record) -> None:
        reply = record.reply
        self.ttft_ms.add(_ms(reply.ttft_s))
        self.tpot_ms.add(_ms(reply.tpot_s))
        self.e2e_ms.add(_ms(reply.e2e_s))
        self.connect_ms.add(_ms(reply.connect_s))
        for gap_s in reply.itl_s:
            self.itl_ms.add(gap_s * 1000)
            self.num_coalesced += gap_s == 0.0
        if reply.usage is None:
            self.num_without_usage += 1
            return
        self.prompt_tokens += reply.usage.prompt_tokens
        self.completion_tokens += reply.usage.completion_tokens
        self.cached_prompt_tokens += reply.usage.cached_prompt_tokens
        self.num_other_length += reply.usage.completion_tokens != record.max_tokens
        if record.num_prompt_tokens is not None:
            self.num_other_prompt += reply.usage.prompt_tokens != record.num_prompt_tokens

    def _add_failure(self, record: Record) -> None:
        reply = record.reply
        if reply.outcome in (Outcome.HTTP_ERROR, Outcome.REJECTED) and reply.status is not None:
            self.statuses[reply.status] += 1
        if reply.message in self.examples or len(self.examples) < _MAX_EXAMPLES:
            self.examples[reply.message] += 1

    def per_second(self, total: float) -> float | None:
        """Returns a total as a rate over the time in which requests were in flight."""
        return total / self.busy_s if self.busy_s > 0 else None

    def token_rate(self, num_tokens: int) -> float | None:
        """Returns a number of tokens as a rate; None, too, if an answer came without `usage`."""
        return None if self.num_without_usage else self.per_second(num_tokens)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
