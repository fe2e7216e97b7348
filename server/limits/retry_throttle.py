"""Who was refused and asks again at once, on the same connection, is looked at later: all such one after the other.

He was told to come back after a second or more. Closed loops that do not listen would else take the processor from the
streams that run, however little each refusal costs.
"""

MIN_GAP_S = 0.025
"""From a refusal to the next look, in which nobody is hasty: clients behind a proxy share its connections."""
NUM_PER_S = 400
MAX_WAIT_S = 1.0


class RetryThrottle:
    """One per server."""

    def __init__(self) -> None:
        self._last_s = 0.0  # when the last of those that wait is looked at

    def wait_s(self, refused_at_s: float, now_s: float) -> float:
        """Until a request may be looked at that comes now. 0 if it is not hasty."""
        if now_s >= refused_at_s + MIN_GAP_S:
            return 0.0
        look_s = max(self._last_s + 1 / NUM_PER_S, refused_at_s + MIN_GAP_S)
        self._last_s = min(look_s, now_s + MAX_WAIT_S)
        return self._last_s - now_s
