"""The roofline of a step: the least time that its work takes on this machine, and what bounds it; torch-free.

A step at least reads the weights and its requests' keys and values once, and multiplies. Whichever takes longer alone,
at the machine's measured peak, is the floor under the step's time (the roofline model of Williams, Waterman and
Patterson 2009). The rest of its time is what could be saved. Requests that share blocks are counted as if each had its
own: CPU or GPU caches may serve them faster.

A peak that was measured while other programs were busy is too low, and a step that beats it shows that: then it is
raised to what that step certainly did, or to what is measured again while the engine rests.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from engine.core.batch import Batch, ScheduledRequest
from engine.core.machine import Bound, Ceilings, ModelSize, StepFloor

Span = tuple[int, int]
"""The positions [start, end) of one request that a step computes."""


class _Work(NamedTuple):
    """What a pass over the model takes."""

    num_bytes: float
    """Expected bytes that it reads."""
    certain_bytes: float
    """The part of these that no choice of experts, and no cache of the machine, can save."""
    flops: float


class Roofline:
    """Computes the floors of one model's steps on one machine."""

    def __init__(self, size: ModelSize, ceilings: Ceilings, draft_size: ModelSize | None = None) -> None:
        """`draft_size` is the size of the draft model, if there is one."""
        self._size = size
        self._ceilings = ceilings
        self._drafting = None if draft_size is None else Roofline(draft_size, ceilings)

    def floor_of(self, batch: Batch, experts_read: float | None = None) -> StepFloor:
        """Returns the floor of the batch's step, including the draft model's passes. The step reads this share of the
        experts, or as many as a choice at random would be."""
        floor = self._floor_of(*_spans_of(batch), experts_read)
        if self._drafting is None:
            return floor
        passes = self._drafting.floors_of_passes(batch)
        return StepFloor(floor.seconds + sum(each.seconds for each in passes), floor.bound)

    @property
    def ceilings(self) -> Ceilings:
        """The peaks: the highest that were measured, or that steps showed them to be."""
        return self._ceilings

    def observe(self, batch: Batch, model_s: float, experts_read: float | None = None) -> None:
        """Raises the peaks where the batch's step, without drafting, took less time than they allow."""
        spans, scored = _spans_of(batch)
        work = self._work_of(spans, scored, experts_read)
        self._raise_to(Ceilings(work.certain_bytes / model_s, work.flops / model_s))

    def measured_again(self, measured: Ceilings) -> None:
        """Raises the peaks to those that another measurement found, which settles whether they are in doubt."""
        self._ceilings = msgspec.structs.replace(self._ceilings, is_in_doubt=measured.is_in_doubt)
        self._raise_to(measured)

    def _raise_to(self, measured: Ceilings) -> None:
        read = max(self._ceilings.read_bytes_per_s, measured.read_bytes_per_s)
        flops = max(self._ceilings.flops_per_s, measured.flops_per_s)
        self._ceilings = msgspec.structs.replace(self._ceilings, read_bytes_per_s=read, flops_per_s=flops)
        if self._drafting is not None:
            self._drafting._ceilings = self._ceilings

    def floors_of_passes(self, batch: Batch) -> Iterator[StepFloor]:
        """Yields the floor of each pass of the draft model. A pass makes one draft token for each request that still
        wants one."""
        wanting = [(each.end - each.num_drafts - 1, each.num_wanted) for each in batch.requests if each.num_wanted]
        for index in range(max((num_wanted for _, num_wanted in wanting), default=0)):
            spans = [(start + index, start + index + 1) for start, num_wanted in wanting if index < num_wanted]
            yield self._floor_of(spans, spans)

    def floor_of_first_token(self) -> StepFloor:
        """Returns the floor of a step for one token alone, which attends to nothing but itself."""
        return self._floor_of([(0, 1)], [(0, 1)])

    def _floor_of(self, spans: Sequence[Span], scored: Sequence[Span], experts_read: float | None = None) -> StepFloor:
        work = self._work_of(spans, scored, experts_read)
        memory_s = work.num_bytes / self._ceilings.read_bytes_per_s
        compute_s = work.flops / self._ceilings.flops_per_s
        return StepFloor(compute_s, Bound.COMPUTE) if compute_s > memory_s else StepFloor(memory_s, Bound.MEMORY)

    def _work_of(self, spans: Sequence[Span], scored: Sequence[Span], experts_read: float | None) -> _Work:
        size, num_tokens, num_scored = self._size, _num_tokens(spans), _num_tokens(scored)
        head_bytes = size.head_bytes if num_scored else 0
        certain_share, share = size.experts_read(1), size.experts_read(num_tokens)
        if experts_read is not None:
            certain_share = share = experts_read
        num_bytes = size.bytes_of(share) + head_bytes
        flops = num_tokens * size.layer_flops + num_scored * size.head_flops
        flops -= (num_tokens - num_scored) * size.last_flops
        for attention in size.attention:
            positions, pairs = _seen(spans, attention.window)
            _, scored_pairs = _seen(scored, attention.window)
            num_bytes += positions * attention.bytes_per_token
            flops += pairs * attention.flops_per_pair + scored_pairs * attention.flops_per_scored_pair
        return _Work(num_bytes, size.bytes_of(certain_share) + head_bytes, flops)


def _spans_of(batch: Batch) -> tuple[list[Span], list[Span]]:
    """Returns the positions that each request computes, and of those the ones whose logits are needed."""
    spans = [(request.start, request.end) for request in batch.requests]
    return spans, [span for request in batch.requests if (span := _scored(request))]


def _scored(request: ScheduledRequest) -> Span | None:
    """Returns the positions whose logits are needed; None if there are none."""
    if request.scores_prompt:
        return request.start, request.end
    return (request.end - 1 - request.num_drafts, request.end) if request.samples else None


def _num_tokens(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in spans)


def _seen(spans: Iterable[Span], window: int | None) -> tuple[int, int]:
    """Counts the positions that the tokens of a step attend to, each once, and the pairs of a token and one of its
    positions."""
    positions = pairs = 0
    for start, end in spans:
        limit = end if window is None else window
        num_short = max(0, min(end, limit) - start)  # tokens that attend to all before them
        pairs += num_short * (2 * start + num_short + 1) // 2 + (end - start - num_short) * limit
        positions += min(end, end - start - 1 + limit)
    return positions, pairs
