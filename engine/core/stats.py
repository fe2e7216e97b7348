"""Numbers about steps and requests: plain values, times in seconds on the machine-wide monotonic clock."""

import math
from collections.abc import Sequence

import msgspec

from engine.core.batch import Phase
from engine.core.machine import Bound


class PoolStats(msgspec.Struct, frozen=True):
    """Blocks by state; the three always sum to the pool's size."""

    free: int
    held: int
    cached: int


class StepStats(msgspec.Struct, frozen=True):
    """One step and the queues after it. Counters are totals since the engine started."""

    phase: Phase | None
    """None when nothing ran: the queues changed through aborts alone."""
    num_requests: int
    num_tokens: int
    duration_s: float
    model_s: float
    """The part of duration_s from the scheduled batch to its tokens: grammar masks, model and sampler, without
    drafting_s. The rest is scheduling, admitting compiled grammars and accounting. 0 for a step that raised."""
    num_running: int
    num_waiting: int
    pool: PoolStats
    num_preemptions: int
    prefix_queries: int
    """Tokens looked up in the prefix cache: of prompts, and of what was generated before the engine started again."""
    prefix_hits: int
    """Of these, tokens found there."""
    predicted_s: float | None = None
    """What model_s was thought to become, from the steps before. None before the first of a phase."""
    floor_s: float | None = None
    """What model_s and drafting_s would be at the machine's measured ceilings. None when nothing ran, and for a step
    that raised."""
    bound: Bound | None = None
    """Which of the ceilings that is."""
    num_drafts: int = 0
    """Tokens that were guessed; a total."""
    num_accepted_drafts: int = 0
    """Of these, tokens that were right; a total."""
    drafting_s: float = 0.0
    """The part of duration_s in which the draft weights guessed."""


class QueueStats(msgspec.Struct, frozen=True):
    """Who is inside, as the server sees it."""

    num_inside: int
    """Requests between their admission and their end."""
    num_waiting_tokens: int
    """Prompt tokens of those that have no first token yet."""
    predicted_wait_s: float
    """From now until a new request would be scheduled."""


def totals_of(stats: StepStats | None) -> dict[str, int]:
    """What is counted since the engine started, by the names of StepStats; zeros before the first step."""
    names = ("num_preemptions", "prefix_queries", "prefix_hits", "num_drafts", "num_accepted_drafts")
    return {name: getattr(stats, name, 0) for name in names}


def standstill(before: StepStats | None, num_waiting: int, num_blocks: int) -> StepStats:
    """While there is no engine everything waits and no block is held. Totals are those of the step `before`."""
    idle = StepStats(None, 0, 0, 0.0, 0.0, 0, num_waiting, PoolStats(num_blocks, 0, 0), 0, 0, 0)
    return msgspec.structs.replace(idle, **totals_of(before))


class RequestTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Where one request's time went: queue + prefill + decode = e2e, exactly, by construction."""

    queue_s: float
    """Arrival to first scheduled."""
    prefill_s: float
    """First scheduled to first token."""
    inter_token_s: tuple[float, ...] = ()
    """Each gap between consecutive tokens (ITL)."""
    prefill_chunks: int = 0
    preemptions: int = 0

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.prefill_s

    @property
    def decode_s(self) -> float:
        """First to last token."""
        return math.fsum(self.inter_token_s)

    @property
    def e2e_s(self) -> float:
        return self.ttft_s + self.decode_s

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between tokens; None with fewer than two tokens."""
        return self.decode_s / len(self.inter_token_s) if self.inter_token_s else None

    def itl_percentile_s(self, percent: float) -> float | None:
        """Nearest-rank percentile of the gaps; None with fewer than two tokens."""
        return nearest_rank(sorted(self.inter_token_s), percent) if self.inter_token_s else None


def nearest_rank(ordered: Sequence[float], percent: float) -> float:
    """The percentile of at least one value."""
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
