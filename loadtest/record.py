"""What is known of one request after it ended: plain frozen data, and the definitions of the latencies.

All times are of one monotonic clock, in seconds. TTFT counts from just before the request is sent (the TCP and TLS
handshake is over by then and kept apart). An arrival is a chunk that carries choices, usually one token; how many
tokens a request has is known from `usage` alone, never from the number of chunks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise


class Outcome(StrEnum):
    """The one way in which a request ended."""

    OK = "ok"
    REJECTED = "rejected"  # 429: the server said no in time
    HTTP_ERROR = "http_error"  # any other status than 200
    STREAM_ERROR = "stream_error"  # an error event after the first byte
    BROKEN = "broken"  # a 200 that did not end as a stream of completions must
    TIMEOUT = "timeout"
    CONNECT_ERROR = "connect_error"


@dataclass(frozen=True, slots=True)
class Usage:
    """The server's count of tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """What one attempt brought back."""

    outcome: Outcome
    sent_s: float
    ended_s: float
    status: int | None = None  # None: no response head arrived
    message: str = ""  # why it is not OK
    retry_after_s: float | None = None
    connect_s: float = 0.0
    arrivals_s: Sequence[float] = ()
    usage: Usage | None = None
    server_ms: Mapping[str, float] = field(default_factory=dict)  # the server's own timings, by its names

    @property
    def ttft_s(self) -> float | None:
        """Sent to first token."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else None

    @property
    def e2e_s(self) -> float | None:
        """Sent to last token."""
        return self.arrivals_s[-1] - self.sent_s if self.arrivals_s else None

    @property
    def itl_s(self) -> list[float]:
        """Each gap between consecutive arrivals. Chunks that came in one read have a gap of zero."""
        return [later - earlier for earlier, later in pairwise(self.arrivals_s)]

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (n - 1), with n from `usage`; None where no gap was seen or n is unknown."""
        if self.usage is None or self.usage.completion_tokens < 2 or len(self.arrivals_s) < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.usage.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Record:
    """One request of the load: its last attempt, and what came before it."""

    group: str
    max_tokens: int
    began_s: float  # before the first attempt's handshake
    reply: Reply
    send_lag_s: float | None = None  # how late the client itself was; None where nothing was due at a given time
    num_retries: int = 0
    retry_wait_s: float = 0.0  # time spent waiting because of 429, in no latency
    num_prompt_tokens: int | None = None  # as sent; None where it was text
