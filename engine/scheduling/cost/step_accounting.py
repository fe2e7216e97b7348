"""What steps were expected to take, what they took, and what they would take at best: for stats, trace and policy."""

from collections.abc import Callable
from typing import NamedTuple

from engine.core.batch import Batch
from engine.core.machine import Measure, StepFloor
from engine.core.stats import KVStoreStats, SchedulerStats, StepStats
from engine.scheduling.cost.roofline import Roofline
from engine.scheduling.cost.step_cost import StepCosts
from engine.scheduling.cost.step_trace import Tracer

_RESTS = (10, 100, 1000)
"""After so many seconds of rest the machine's peaks are measured again, for half a second each time."""


class StepTimes(NamedTuple):
    """Seconds of one step by part; all zero for a step that ran nothing or raised."""

    model_s: float = 0.0
    """From the scheduled batch to its tokens: grammar masks, model and sampler."""
    drafting_s: float = 0.0
    """Time of the draft model, before that."""
    predicted_s: float | None = None
    """Prediction of `model_s`; None before the first step of a phase."""


class StepCounts(NamedTuple):
    """Counts of one step beside the scheduler's; fields as in `StepStats`, and the KV store's."""

    num_generated: int = 0
    num_deferred: int = 0
    num_aborts: int = 0
    experts_read: float | None = None
    store: KVStoreStats = KVStoreStats()


class StepAccounting:
    """Learns from each step what steps cost, and reports it; has no clock of its own."""

    def __init__(self, costs: StepCosts, roofline: Roofline, tracer: Tracer, measure: Measure | None = None) -> None:
        """`costs` are those that the scheduling policy plans with; `measure` measures the machine's peaks again."""
        self._costs = costs
        self._roofline = roofline
        self._tracer = tracer
        self._measure = measure or (lambda _: roofline.ceilings)
        self._num_rests = 0
        self._is_measurement_due = False

    def predict(self, batch: Batch) -> float | None:
        """Returns the expected `model_s` of the batch's step; None before the first step of its phase."""
        return self._costs.predict(batch)

    def observe(self, batch: Batch, model_s: float, experts_read: float | None) -> None:
        """Learns that the batch, as it ran, took `model_s`, and read this share of the experts, if that is known."""
        self._costs.observe(batch, model_s, experts_read)

    def observe_drafting(self, batch: Batch, drafting_s: float) -> None:
        """Learns that the draft model took `drafting_s` for the draft tokens of the batch."""
        self._costs.observe_drafting(batch, drafting_s)

    def record(
        self,
        batch: Batch | None,
        times: StepTimes,
        counts: StepCounts,
        scheduler: SchedulerStats,
        ended_s: float,
        duration_s: float,
    ) -> StepStats:
        """Returns the stats of a step that ended, and writes its line of the trace."""
        floor = self._floor_of(batch, times, counts.experts_read) if batch and times.model_s else None
        stats = StepStats(
            phase=batch.phase if batch else None,
            num_requests=len(batch.requests) if batch else 0,
            num_tokens=batch.num_tokens if batch else 0,
            duration_s=duration_s,
            end_s=ended_s,
            floor_s=floor.seconds if floor else None,
            bound=floor.bound if floor else None,
            ceilings=self._roofline.ceilings,
            **times._asdict(),
            num_generated=counts.num_generated,
            num_deferred=counts.num_deferred,
            num_aborts=counts.num_aborts,
            experts_read=counts.experts_read,
            **counts.store._asdict(),
            **scheduler._asdict(),
        )
        self._tracer.record(batch, stats)
        return stats

    def _floor_of(self, batch: Batch, times: StepTimes, experts_read: float | None) -> StepFloor:
        """Returns the floor of a step as it ran: at most the time that it took, where a cache of the machine served
        what is counted as read from memory."""
        self._roofline.observe(batch, times.model_s, experts_read)
        floor = self._roofline.floor_of(batch, experts_read)
        return floor._replace(seconds=min(floor.seconds, times.model_s + times.drafting_s))

    def rest(self, is_wanted: Callable[[], bool]) -> None:
        """Measures the machine's peaks again after a while without work: the machine may be quieter than it was. One
        that is given up, because the process `is_wanted`, is made in the next rest."""
        self._num_rests += 1
        self._is_measurement_due |= self._num_rests in _RESTS
        if self._is_measurement_due and (measured := self._measure(is_wanted)) is not None:
            self._roofline.measured_again(measured)
            self._is_measurement_due = False

    def close(self) -> None:
        """Closes the trace."""
        self._tracer.close()
