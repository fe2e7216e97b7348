"""Response model of GET /stats/timeline. Times are milliseconds since the server started."""

from typing import Literal

from pydantic import BaseModel

from server.protocol.answers import Timings


class MeanAndMax(BaseModel):
    mean: float
    max: float


class TimelineSecond(BaseModel):
    start_ms: int
    prefill_tokens: float
    """Tokens of prompts that were computed; a step's are spread over the time in which it ran."""
    decode_tokens: float
    """Tokens that decode steps generated, spread likewise."""
    prefill_ms: float
    """Time in prefill steps."""
    decode_ms: float
    running: int | None
    """Sequences that ran after the last step that ended in this second; null where none did."""
    waiting: int | None
    kv_held_ratio: float | None
    ttft_ms: MeanAndMax | None
    """TTFT of first tokens in this second."""
    itl_ms: MeanAndMax | None
    """Gaps that ended in this second."""


class ComputedTokens(BaseModel):
    """What a step computed of one sequence: the positions from `start` to before `end`, draft tokens included."""

    id: str
    start: int
    end: int


class TimelineStep(BaseModel):
    phase: Literal["prefill", "decode"]
    end_ms: float
    duration_ms: float
    model_ms: float
    """The part of the duration that the model took."""
    floor_ms: float | None
    """What it would have taken at the machine's measured peaks; null for a step that failed, and while these
    peaks are in doubt."""
    bound: Literal["compute", "memory"] | None
    """Which of these peaks bounds it."""
    requests: int
    """Sequences that the step computed, those of all API keys."""
    tokens: int
    generated_tokens: int
    kv_held_blocks: int
    kv_cached_blocks: int
    kv_free_blocks: int
    computed: list[ComputedTokens] | None
    """What it computed of this API key's requests, or with --fair-by address of this address's. Null for a step too
    long ago: of all steps together, the newest 10,000 of such entries are kept."""


class EndedRequest(BaseModel):
    id: str
    arrival_ms: float
    end_ms: float
    model: str | None
    status: int
    finish: str | None
    """How its sequences ended; null if the client left before."""
    timings: Timings
    """Times as in its response; without times after the first token if the stream was cut off."""


class TimelineBody(BaseModel):
    cursor: int
    """Send it as `after` to get what is new since."""
    now_ms: float
    seconds: list[TimelineSecond]
    """Seconds of the last five minutes in which something happened, and that changed."""
    steps: list[TimelineStep]
    """At most the newest 2,000, the oldest first."""
    requests: list[EndedRequest]
    """Ended requests of this API key that got a token, among the newest 500 of all."""
