"""Measures the throughput of a resource while requests wait for it; torch-free."""

from collections import deque
from collections.abc import Callable


class ThroughputMeter:
    """Counts amounts that drained, and the busy time that they took, over the newest `num_measured` of them.

    `run` starts and stops its clock: time in which no request waited says nothing about the speed. What was measured
    before an idle time still counts after it.
    """

    def __init__(self, num_measured: int, clock: Callable[[], float]) -> None:
        self._num_measured = num_measured
        self._clock = clock
        self._busy_s = 0.0  # until `_running_since_s`
        self._running_since_s: float | None = None
        self._drained: deque[tuple[float, int]] = deque()  # (busy time, amount)
        self._total = 0  # of the amounts in `_drained`
        self._measured_from_s = 0.0  # busy time

    @property
    def total(self) -> int:
        return self._total

    @property
    def measured_s(self) -> float:
        """Busy seconds that `total` took. They go on while nothing drains: a stall makes the rate fall."""
        return self._now_s - self._measured_from_s

    def run(self, is_busy: bool) -> None:
        """Let the clock run or pause. Call after each change."""
        if is_busy and self._running_since_s is None:
            self._running_since_s = self._clock()
        elif not is_busy and self._running_since_s is not None:
            self._busy_s, self._running_since_s = self._now_s, None

    def add(self, amount: int) -> None:
        """Count an amount that drained just now, unless the clock is paused."""
        if self._running_since_s is None:
            return
        self._drained.append((self._now_s, amount))
        self._total += amount
        if len(self._drained) > self._num_measured:
            self._measured_from_s, oldest = self._drained.popleft()
            self._total -= oldest

    def forget_stall(self) -> None:
        """Forget the busy time since the newest amount."""
        self._busy_s = self._drained[-1][0] if self._drained else self._measured_from_s
        if self._running_since_s is not None:
            self._running_since_s = self._clock()

    @property
    def _now_s(self) -> float:
        running_s = 0.0 if self._running_since_s is None else self._clock() - self._running_since_s
        return self._busy_s + running_s
