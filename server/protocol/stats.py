"""GET /stats: what the newest requests and steps took."""

from pydantic import BaseModel


class Percentiles(BaseModel):
    """Milliseconds, by nearest rank."""

    p50: float
    p90: float
    p99: float
    max: float


class Totals(BaseModel):
    """Since the server started."""

    requests: int
    """Sequences that ended, however."""
    prompt_tokens: int
    generated_tokens: int


class RecentRequests(BaseModel):
    """The newest sequences that got a token and ended, 1,000 at most; null where there is none."""

    count: int
    over_s: float
    """Since the oldest of them ended."""
    queue_ms: Percentiles | None
    prefill_ms: Percentiles | None
    ttft_ms: Percentiles | None
    decode_ms: Percentiles | None
    itl_ms: Percentiles | None
    """Of single gaps, also those of running sequences: the newest 10,000."""
    e2e_ms: Percentiles | None


class RecentSteps(BaseModel):
    """The newest 1,000 of a phase."""

    count: int
    tokens: float
    """Mean of a step."""
    mean_ms: float
    of_ceiling: float
    """What they would have taken at the machine's measured ceilings, over what the model took."""


class Stats(BaseModel):
    totals: Totals
    requests: RecentRequests
    prefill: RecentSteps | None
    decode: RecentSteps | None
