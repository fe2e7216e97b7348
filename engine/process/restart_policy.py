"""Whether an engine process that died is started again, and after how long; torch-free."""

import time
from collections import deque
from collections.abc import Callable

_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 30.0
_WINDOW_S = 3600.0
_PER_WINDOW = 10


class RestartPolicy:
    """Allows at most `max_in_a_row` fruitless restarts in a row, with growing delays, and ten times as many restarts in
    any hour.

    A restart was fruitful if its process answered a request, or ended with nothing to do.
    """

    def __init__(self, max_in_a_row: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_in_a_row = max_in_a_row
        self._clock = clock
        self._num_in_a_row = 0
        self._restarted_at_s: deque[float] = deque()

    def on_death(self, was_fruitful: bool) -> float | None:
        """Returns the seconds to wait before the next start; None when there shall be none."""
        if was_fruitful:
            self._num_in_a_row = 0
        now_s = self._clock()
        while self._restarted_at_s and now_s - self._restarted_at_s[0] > _WINDOW_S:
            self._restarted_at_s.popleft()
        num_in_window = len(self._restarted_at_s)
        if self._num_in_a_row >= self._max_in_a_row or num_in_window >= _PER_WINDOW * self._max_in_a_row:
            return None
        self._restarted_at_s.append(now_s)
        self._num_in_a_row += 1
        if self._num_in_a_row == 1:
            return 0.0
        return float(min(_FIRST_DELAY_S * 2 ** min(self._num_in_a_row - 2, 10), _MAX_DELAY_S))
