"""Numbers about steps and requests: plain values, times in seconds on the machine-wide monotonic clock."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from engine.core.batch import Phase
from engine.core.machine import Bound, Ceilings


class PoolStats(msgspec.Struct, frozen=True, gc=False):
    """Blocks by state; the three always sum to the pool's size."""

    free: int
    held: int
    cached: int


class SchedulerStats(NamedTuple):
    """Queues and KV blocks after a step, and totals since the engine started; fields as in `StepStats`."""

    num_running: int
    num_waiting: int
    pool: PoolStats
    num_preemptions: int
    prefix_queries: int
    prefix_hits: int
    num_drafts: int
    num_accepted_drafts: int
    prefix_disk_hits: int = 0
    prefix_disk_declined: int = 0
    prefill_saved_s: float = 0.0


class KVStoreStats(NamedTuple):
    """The KV store after a step; fields as in `StepStats`. All are 0 without one."""

    store_bytes: int = 0
    store_reads: int = 0
    store_read_bytes: int = 0
    store_written_bytes: int = 0
    store_damaged_files: int = 0


class StepStats(msgspec.Struct, frozen=True, gc=False):
    """Figures of one step and of the queues after it. Counters are totals since the engine started.

    The newest thousands are kept, so the garbage collector does not look at them."""

    phase: Phase | None
    """Phase of the step; None if nothing ran and the queues changed through aborts alone."""
    num_requests: int
    num_tokens: int
    duration_s: float
    model_s: float
    """The part of duration_s from the scheduled batch to its tokens: grammar masks, model and sampler, without
    drafting_s. The rest is scheduling, admitting requests with compiled grammars, and accounting. 0 for a step that
    raised."""
    num_running: int
    num_waiting: int
    pool: PoolStats
    num_preemptions: int
    prefix_queries: int
    """Tokens looked up in the prefix cache: those of prompts, and those generated before an engine restart."""
    prefix_hits: int
    """The part of `prefix_queries` that was found there, the tokens of `prefix_disk_hits` included."""
    predicted_s: float | None = None
    """Prediction of model_s from the steps before. None before the first step of a phase."""
    floor_s: float | None = None
    """What model_s and drafting_s together would take at the machine's measured peaks (the roofline). None if nothing
    ran, and for a step that raised."""
    bound: Bound | None = None
    """Whether floor_s is limited by compute or by memory bandwidth."""
    experts_read: float | None = None
    """Share of the model's experts whose weights were read, over all layers; None where that is not counted."""
    ceilings: Ceilings | None = None
    """The machine's peaks as they are known by now: what was measured, or steps showed. None if no engine runs."""
    end_s: float = 0.0
    """When the step ended."""
    num_drafts: int = 0
    """Draft tokens that steps verified; a total."""
    num_accepted_drafts: int = 0
    """Draft tokens that were accepted; a total."""
    drafting_s: float = 0.0
    """The part of duration_s that the draft model took."""
    num_generated: int = 0
    """Tokens that the step generated, for all its requests."""
    num_deferred: int = 0
    """The part of `num_waiting` whose grammars are being compiled."""
    num_aborts: int = 0
    """Aborts that the engine was told of; a total."""
    prefix_disk_hits: int = 0
    """The part of `prefix_hits` that was read from the KV store; a total."""
    prefix_disk_declined: int = 0
    """Tokens that the KV store has and that were computed, because that was predicted to be faster; a total."""
    prefill_saved_s: float = 0.0
    """Predicted time that computing the tokens of `prefix_hits` would have taken; a total."""
    store_bytes: int = 0
    """Size of the KV store's files, also those of other servers and models."""
    store_reads: int = 0
    """Files of the KV store that are being read, or wait for that."""
    store_read_bytes: int = 0
    """Bytes read from the KV store; a total."""
    store_written_bytes: int = 0
    """Bytes written to the KV store; a total."""
    store_damaged_files: int = 0
    """Files of the KV store that did not hold what they should; a total."""

    @property
    def certain_floor_s(self) -> float | None:
        """`floor_s`; None while the peaks are in doubt."""
        return None if self.ceilings is not None and self.ceilings.is_in_doubt else self.floor_s


class StepShare(msgspec.Struct, frozen=True, gc=False):
    """What a step computed of one request, as its tenant may know it: the positions [start, end)."""

    tenant: str
    client_request_id: str
    start: int
    end: int


class QueueStats(msgspec.Struct, frozen=True):
    """Load of the engine, as admission control in the server process sees it."""

    num_in_flight: int
    """Requests between their admission and their end."""
    num_waiting_tokens: int
    """Prompt tokens of the requests that have no first token yet."""
    predicted_wait_s: float
    """Predicted time until a request that is admitted now would be scheduled."""


_TOTALS = (
    "num_preemptions",
    "prefix_queries",
    "prefix_hits",
    "prefix_disk_hits",
    "prefix_disk_declined",
    "prefill_saved_s",
    "num_drafts",
    "num_accepted_drafts",
    "store_read_bytes",
    "store_written_bytes",
    "store_damaged_files",
)


def totals_of(stats: StepStats | None) -> dict[str, float]:
    """Returns the totals since the engine started, by their names in StepStats; zeros before the first step."""
    return {name: getattr(stats, name, 0) for name in _TOTALS}


def stats_without_engine(before: StepStats | None, num_waiting: int, num_blocks: int) -> StepStats:
    """Returns the stats while no engine runs: all requests wait and no block is held. Totals are those of `before`."""
    idle = StepStats(None, 0, 0, 0.0, 0.0, 0, num_waiting, PoolStats(num_blocks, 0, 0), 0, 0, 0)
    return msgspec.structs.replace(idle, **totals_of(before))


class RequestTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Where one request's time went. By construction queue_s + remote_prefill_s + prefill_s + decode_s = e2e_s,
    exactly."""

    queue_s: float
    """Time from arrival until first scheduled, without `remote_prefill_s`."""
    remote_prefill_s: float | None = None
    """Time in which another server was asked to compute the prompt; None if none was."""
    prefill_s: float
    """Time from first scheduled to first token."""
    inter_token_s: tuple[float, ...] = ()
    """Each gap between consecutive tokens (ITL)."""
    prefill_chunks: int = 0
    preemptions: int = 0

    @property
    def ttft_s(self) -> float:
        return self.queue_s + (self.remote_prefill_s or 0.0) + self.prefill_s

    @property
    def decode_s(self) -> float:
        """Time from first to last token."""
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
    """Returns the nearest-rank percentile of ascending values, of which there must be at least one."""
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
