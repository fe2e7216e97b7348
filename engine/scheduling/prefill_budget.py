"""How much prompt the next prefill step may compute: limited in tokens and, between two decode steps, in time;
torch-free."""

from collections.abc import Sequence
from math import inf

from engine.core.request import Request
from engine.scheduling.cost.num_within import num_within
from engine.scheduling.cost.step_cost import NO_PREFILL, StepCosts, with_chunk

_MIN_CHUNK = 16  # tokens: prefill makes progress whatever it costs, and no step is wasted on fewer
_SHARED_PART = 1 / 16  # of the target gap: a step's time where other tenants may come meanwhile
_NUM_LEAST_STEPS = 8  # but so many times the shortest step: then beginning steps takes an eighth of the time


class PrefillBudget:
    """The budget of one prefill step, of which requests take their chunks in turn."""

    def __init__(
        self, costs: StepCosts, max_s: float, max_tokens: int, max_scored_tokens: int, interval: int | None = None
    ) -> None:
        """Chunks end at multiples of `interval`, if there is one, at the latest."""
        self._costs = costs
        self._interval = interval
        self._max_s = max_s
        self._num_left = max_tokens
        self._num_scored_left = max_scored_tokens
        self._work = NO_PREFILL

    @property
    def is_spent(self) -> bool:
        """Whether no further chunk fits; False before the first chunk."""
        if self._work == NO_PREFILL:
            return False
        next_work = with_chunk(self._work, 0, _MIN_CHUNK, False)
        return self._num_left == 0 or self._costs.prefill_bound(next_work) > self._max_s

    def can_continue(self, request: Request) -> bool:
        """Returns whether a request whose prompt is computed in part should take another chunk: not for a single token
        whose logprob it wants."""
        may_score = self._num_scored_left > 0 or self._work == NO_PREFILL
        return not self.is_spent and (may_score or not request.scores_prompt)

    def take(self, request: Request) -> int:
        """Takes the request's next chunk from the budget, and returns its number of tokens. It is at least one: a new
        request whose prompt logprobs do not fit must not hold up those behind it. Call only while the budget is not
        spent."""
        wanted = min(request.num_uncomputed_tokens, self._num_left)
        if self._interval is not None:
            wanted = min(wanted, self._interval - request.num_computed_tokens % self._interval)
        if request.scores_prompt:
            wanted = min(wanted, max(self._num_scored_left, 1))
        num_chunks = -(-wanted // max(self._num_fitting(request, wanted), 1))
        count = max(-(-wanted // num_chunks), min(_MIN_CHUNK, wanted))  # where it takes two chunks, two halves
        self._work = self._work_with(request, count)
        self._num_left -= count
        self._num_scored_left -= count * request.scores_prompt
        return count

    def _num_fitting(self, request: Request, wanted: int) -> int:
        """Returns how many tokens of [0, wanted] fit into the time: the bound never falls as tokens are added."""
        return num_within(self._max_s, wanted, lambda count: self._costs.prefill_bound(self._work_with(request, count)))

    def _work_with(self, request: Request, count: int) -> tuple[float, ...]:
        return with_chunk(self._work, request.num_computed_tokens, count, request.scores_prompt)


class PrefillPace:
    """Makes each prefill step's budget. A gap between two tokens of a stream is a prefill step and a decode step."""

    def __init__(
        self,
        costs: StepCosts,
        *,
        target_gap_s: float,
        max_tokens: int,
        max_tokens_per_gap: int,
        max_scored_tokens: int,
        interval: int | None = None,
    ) -> None:
        """Chunks end at multiples of `interval`, if there is one, at the latest: the states after these are copied."""
        self._costs = costs
        self._interval = interval
        self._target_gap_s = target_gap_s
        self._max_tokens = max_tokens
        self._max_tokens_per_gap = min(max_tokens_per_gap, max_tokens)
        self._max_scored_tokens = max_scored_tokens

    def while_none_decodes(self, is_shared: bool = False) -> PrefillBudget:
        """Returns the whole budget; where several tenants share the engine, a part of the target gap, since one that
        asks for little may come meanwhile: as much as keeps steps from costing much more than their tokens."""
        return self._budget(self._shared_s() if is_shared else inf, self._max_tokens)

    def _shared_s(self) -> float:
        least_s = self._costs.prefill_bound(with_chunk(NO_PREFILL, 0, _MIN_CHUNK, False))
        return min(self._target_gap_s, max(_SHARED_PART * self._target_gap_s, _NUM_LEAST_STEPS * least_s))

    def within_a_gap(self, decoding: Sequence[Request]) -> PrefillBudget:
        """Returns the budget that a decode step of these requests leaves of the target gap, at least twice that step's
        time: where reading weights takes the time, a prefill step spends the first half on that, and the other half on
        tokens."""
        decode_s = self._costs.decode_bound(decoding)
        return self._budget(max(self._target_gap_s - decode_s, 2 * decode_s), self._max_tokens_per_gap)

    def saving(self, num_tokens: int) -> float:
        """Returns the expected seconds of the prefill that a cached prefix of `num_tokens` saves; 0 where unknown."""
        return self._costs.prefill_saving(num_tokens)

    def _budget(self, max_s: float, max_tokens: int) -> PrefillBudget:
        return PrefillBudget(self._costs, max_s, max_tokens, self._max_scored_tokens, self._interval)
