"""Many decode steps at once: where nothing but decode steps of the same requests can come, their times and tokens are
known beforehand. What comes of them is what comes of one step after the other."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.batch import Phase
from engine.core.request import Request
from engine.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Stretch:
    """Decode steps that follow one another, each with one token of each of these requests."""

    start_s: float
    requests: Sequence[Request]
    ends_s: Sequence[float]
    """When each step ends; never empty."""

    def __len__(self) -> int:
        return len(self.ends_s)

    @property
    def last_start_s(self) -> float:
        return self.ends_s[-2] if len(self.ends_s) > 1 else self.start_s

    def before(self, now_s: float) -> "Stretch | None":
        """Returns the steps that have ended before now; None if there are none."""
        return self._first(bisect_left(self.ends_s, now_s))

    def under_way(self, now_s: float) -> "Stretch":
        """Returns the steps that have begun before now."""
        return self._first(bisect_left(self.ends_s, now_s) + 1) or self

    def _first(self, num_steps: int) -> "Stretch | None":
        return Stretch(self.start_s, self.requests, self.ends_s[:num_steps]) if num_steps else None


class StretchingScheduler(Scheduler):
    """The engine's scheduler, which also says how many steps will be alike, and does at once what these do."""

    def alike(self, block_size: int) -> tuple[Sequence[Request], int]:
        """Returns requests, and how many of the next steps give each of these one token and do nothing else, if none
        comes or goes meanwhile: none ends, none fills or needs a block. Where others wait or are in prefill, these
        steps are the decode step behind a prefill step, if it is next. It takes requests to draft nothing."""
        if len(self._loading) or self._kv.has_transfers:
            return (), 0
        is_next_alone = self._last_phase is Phase.PREFILL
        if len(self._waiting) and not is_next_alone:
            return (), 0
        requests = [request for request in self._running if not request.needs_prefill]
        is_alone = len(requests) == len(self._running) and not len(self._waiting)
        if not (requests and (is_alone or is_next_alone)):
            return (), 0
        num_steps = _num_alike(requests, block_size)
        return requests, num_steps if is_alone else min(num_steps, 1)

    def run(self, stretch: Stretch) -> None:
        """Does what the steps of a stretch do, which the model counts in: each token is the one before it plus one."""
        self._kv.begin_step(stretch.last_start_s)
        self.newly_scheduled = []
        self._last_phase = Phase.DECODE
        num_steps = len(stretch)
        for request in stretch.requests:
            output = request.output_token_ids
            output.extend(range(output[-1] + 1, output[-1] + 1 + num_steps))
            request.num_computed_tokens += num_steps
            self._waiting.charge(request, num_steps)


def _num_alike(requests: Sequence[Request], block_size: int) -> int:
    """Returns for how many decode steps none of the requests ends, or fills or needs a block."""
    least = None
    for request in requests:
        num_tokens, num_output = request.num_tokens, len(request.output_token_ids)
        if not request.is_announced or len(request.block_table) * block_size < num_tokens:
            return 0
        num_steps = min(request.asked.params.max_tokens - num_output - 1, -num_tokens % block_size)
        if num_steps == 0:
            return 0
        least = num_steps if least is None else min(least, num_steps)
    return least or 0
