"""The retry throttle: delays requests that follow an early refusal (429, 503) at once, on the same connection.

The refusal's Retry-After was a second or more. Clients that ignore it and retry in a closed loop would otherwise take
the processor from the running streams, however little each refusal costs.
"""

MIN_GAP_S = 0.025
"""Seconds after a refusal until its connection's next request is not delayed: clients behind a proxy share its
connections, so a request that comes later need not be a retry."""
NUM_PER_S = 400
"""Delayed requests per second, of all connections together."""
MAX_WAIT_S = 1.0
"""Longest delay of a request, in seconds."""


class RetryThrottle:
    """Spaces early retries out. One per server."""

    def __init__(self) -> None:
        self._last_s = 0.0  # when the last of the delayed requests will be handled

    def wait_s(self, refused_at_s: float, now_s: float) -> float:
        """Returns the delay of a request that arrives now on a connection that was refused at `refused_at_s`; 0 if the
        gap is long enough. Both times are the event loop's."""
        if now_s >= refused_at_s + MIN_GAP_S:
            return 0.0
        handle_s = max(self._last_s + 1 / NUM_PER_S, refused_at_s + MIN_GAP_S)
        self._last_s = min(handle_s, now_s + MAX_WAIT_S)
        return self._last_s - now_s
