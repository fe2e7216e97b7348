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

    def num_alike(self, block_size: int) -> int:
        """Returns how many of the next steps give each running request one token and do nothing else, if no request
        comes or goes meanwhile: none waits or ends, none fills or needs a block. It takes requests to draft nothing."""
        if len(self._waiting) or len(self._loading) or self._kv.has_transfers:
            return 0
        return min([_num_alike(request, block_size) for request in self._running], default=0)

    @property
    def running(self) -> Sequence[Request]:
        return self._running

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


def _num_alike(request: Request, block_size: int) -> int:
    lacks_block = len(request.block_table) * block_size < request.num_tokens
    if lacks_block or request.needs_prefill or not request.is_announced:
        return 0
    num_left = request.asked.params.max_tokens - len(request.output_token_ids) - 1
    return min(num_left, -request.num_tokens % block_size)
