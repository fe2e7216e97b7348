"""The record of one ended request, plain frozen data, and the definitions of the latencies.

All times are of one monotonic clock, in seconds. TTFT counts from just before the request is sent (the TCP and TLS
handshake is over by then and kept apart). An arrival is a chunk that carries choices, usually one token; how many
tokens a request has is known from `usage` alone, never from the number of chunks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from loadtest.sessions.answer import Answer


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    REJECTED = "rejected"  # 429: the server shed the request
    HTTP_ERROR = "http_error"  # any other status than 200
    STREAM_ERROR = "stream_error"  # an error event after the first byte
    BROKEN = "broken"  # a 200 that did not end as a stream of completions must
    TIMEOUT = "timeout"
    CONNECT_ERROR = "connect_error"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, as the server reports them in `usage`."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """The response to one attempt."""

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
    answer: Answer = field(default_factory=Answer)  # empty unless it is to be kept

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from sent to the first arrival."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else None

    @property
    def e2e_s(self) -> float | None:
        """Time from sent to the last arrival."""
        return self.arrivals_s[-1] - self.sent_s if self.arrivals_s else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: each gap between consecutive arrivals. Chunks that came in one read have a gap of
        zero."""
        return [later - earlier for earlier, later in pairwise(self.arrivals_s)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token: (last arrival - first arrival) / (n - 1), with n from `usage`; None if there was no
        gap or n is unknown."""
        if self.usage is None or self.usage.completion_tokens < 2 or len(self.arrivals_s) < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.usage.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Record:
    """One request of the load: its last attempt, and the time and number of those before."""

    group: str
    max_tokens: int
    began_s: float  # before the first attempt's handshake
    reply: Reply
    send_lag_s: float | None = None  # how late the client sent it; None if it was not due at a given time
    num_retries: int = 0
    retry_wait_s: float = 0.0  # time spent waiting because of 429, in no latency
    num_prompt_tokens: int | None = None  # as sent; None for a text prompt
    turn: int | None = None  # of an agent's session, from 1 on
