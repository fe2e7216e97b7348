"""GET /stats: latencies of recent requests and durations of recent steps; GET /stats/diagnosis: what they say."""

from typing import Literal

from pydantic import BaseModel


class Percentiles(BaseModel):
    """Percentiles in milliseconds, by nearest rank."""

    p50: float
    p90: float
    p99: float
    max: float


class Totals(BaseModel):
    """Counts since the server started."""

    requests: int
    """Sequences that ended, in whatever way."""
    prompt_tokens: int
    generated_tokens: int


class RecentRequests(BaseModel):
    """Latencies of the last 1,000 sequences that got a token and ended; null where there is none."""

    count: int
    over_s: float
    """Seconds since the oldest of these sequences ended."""
    queue_ms: Percentiles | None
    prefill_ms: Percentiles | None
    ttft_ms: Percentiles | None
    decode_ms: Percentiles | None
    itl_ms: Percentiles | None
    """Inter-token latencies, those of running sequences included: the last 10,000 gaps."""
    e2e_ms: Percentiles | None


class RecentSteps(BaseModel):
    """Means over the last 1,000 steps of a phase."""

    count: int
    tokens: float
    """Mean number of tokens in a step."""
    mean_ms: float
    of_ceiling: float | None
    """Time that the steps would have taken at the machine's measured peaks, divided by the time that the model took;
    null while these peaks are in doubt."""
    bound: Literal["compute", "memory"]
    """Which of these peaks would bound most of that time."""


class PrefixCacheTotals(BaseModel):
    """What the prefix cache found since the server started, and its KV store now."""

    prompt_tokens: int
    """Tokens that were looked up."""
    memory_hit_tokens: int
    disk_hit_tokens: int
    """Tokens that were read from the KV store."""
    prefill_saved_ms: float
    """Predicted time that computing the tokens found would have taken."""
    disk_bytes: int
    """Size of the KV store's files."""
    disk_read_bytes: int
    disk_written_bytes: int
    disk_reads: int
    """Files of the KV store that are being read, or wait for that."""


class Stats(BaseModel):
    totals: Totals
    prefix_cache: PrefixCacheTotals
    requests: RecentRequests
    prefill: RecentSteps | None
    decode: RecentSteps | None


class Diagnosis(BaseModel):
    """Whether answers are slow to start or slow to stream, why, and what would help."""

    verdict: Literal["unknown", "neither", "start", "stream", "both"]
    """unknown: no answer has ended yet."""
    cause: Literal["queue", "prefill", "decode"] | None
    """The phase that most of the median answer's slow part is spent in, or of all of it if neither is slow."""
    sentence: str
    evidence: list[str]
    advice: list[str]
