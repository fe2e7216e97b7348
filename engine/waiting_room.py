"""How many requests may be inside at once, and when one that found no room should come back."""

import time
from collections import deque
from collections.abc import Callable

from engine.errors import OverloadedError

_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_NUM_MEASURED = 64  # leavings that the drain rate is measured over


class WaitingRoom:
    """A bounded number of places. Who finds none is told when one should be free, at the rate measured lately.

    Those refused one after the other are told different times, so that they do not all come back at once.
    """

    def __init__(self, num_places: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_places = num_places
        self._clock = clock
        self._num_inside = 0
        self._num_refused = 0  # since someone last found a place
        self._measured_from_s = 0.0
        self._left_at_s: deque[float] = deque()

    @property
    def num_inside(self) -> int:
        return self._num_inside

    def enter(self) -> None:
        """Take a place. Raises OverloadedError."""
        if self._num_inside >= self._num_places:
            self._num_refused += 1
            raise OverloadedError(
                f"All {self._num_places} places are taken by running and waiting requests; try again later.",
                retry_after_s=self._retry_after_s(),
            )
        if self._num_inside == 0:  # what was measured before an idle time says nothing about now
            self._measured_from_s = self._clock()
            self._left_at_s.clear()
        self._num_refused = 0
        self._num_inside += 1

    def leave(self) -> None:
        self._num_inside -= 1
        self._left_at_s.append(self._clock())
        if len(self._left_at_s) > _NUM_MEASURED:
            self._measured_from_s = self._left_at_s.popleft()

    def _retry_after_s(self) -> float:
        if not self._left_at_s:
            return _MIN_RETRY_S
        seconds_per_place = (self._clock() - self._measured_from_s) / len(self._left_at_s)
        return min(max(self._num_refused * seconds_per_place, _MIN_RETRY_S), _MAX_RETRY_S)
