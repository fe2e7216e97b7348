"""Plans which draft tokens a decode step verifies; torch-free.

A draft token is accepted if it is the token that is chosen at its position anyhow, greedy or sampled (Leviathan et al.
2023, by exact match). So drafts make an answer faster and never another one. Where a step is bound by memory bandwidth,
of which a few more tokens need hardly any, a rejected draft token costs little.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from engine.core.batch import ScheduledRequest
from engine.core.draft import NO_DRAFT, Draft
from engine.core.request import Request
from engine.scheduling.cost.step_cost import StepCosts, TokenPrice
from engine.scheduling.speculation.draft_length import DraftLengthPolicy, NoDraftModel

_MARGIN = 2.0  # drafts of one request lengthen the step of all: they must be worth it twice
_LONGER = 0.5  # of a step's time without drafts, at most
_FIRST, _MOST = 8, 64  # draft tokens of one step: before any were tried, and ever
_NO_TOKEN = -1  # a draft token that is never sampled
_RETRY_STEPS = 100  # without a draft that is worth it: its price may be a measurement error, or have changed


class PlannedDraft(NamedTuple):
    """The draft of one request for one step."""

    token_ids: Sequence[int] = ()
    num_wanted: int = 0
    """Number of draft tokens that the draft model is to make."""


NO_PLANNED_DRAFT = PlannedDraft()


class SpeculationPlanner:
    """Plans the draft tokens of each decode step: the likeliest of all its requests, as far as they are worth their
    time and delay no request for long; or those of the draft model, where these bring tokens faster."""

    def __init__(
        self, costs: StepCosts, max_tokens: int, target_gap_s: float, draft_lengths: DraftLengthPolicy | None = None
    ) -> None:
        """`max_tokens` limits the draft of one request in one step. `draft_lengths` is the policy for the draft model,
        if there is one."""
        self._draft_lengths = draft_lengths or NoDraftModel()
        self._costs = costs
        self._max_tokens = max_tokens
        self._target_gap_s = target_gap_s
        self._trusted = _FIRST  # twice as many as one step tried so far: what a token costs is learnt on the way
        self._num_without = 0  # steps in a row that tried none
        self.num_drafts = 0
        self.num_accepted = 0

    def plan(self, requests: Sequence[Request]) -> list[PlannedDraft]:
        """Returns the draft of each request. The step samples one token more than a draft has, and no request may
        exceed its `max_tokens`."""
        price = self._costs.decode_price(requests)
        drafts = self._drafts(requests, price)
        lengths = self._draft_lengths.plan(requests, drafts, price)
        if any(lengths):
            return [PlannedDraft(num_wanted=length) for length in lengths]
        return [PlannedDraft(draft.token_ids) for draft in drafts]

    def _drafts(self, requests: Sequence[Request], price: TokenPrice) -> list[Draft]:
        """Returns what is worth its time of the drafts that the requests' own drafters propose."""
        step_s, token_s = price
        min_chance = _MARGIN * len(requests) * token_s / step_s if step_s else 0.0
        spare_s = min(_LONGER * step_s, self._target_gap_s - step_s)
        limit = self._trusted if token_s == 0.0 else min(int(max(spare_s, 0.0) / token_s), self._trusted)
        drafts = self._likeliest(requests, min_chance, limit)
        self._num_without = 0 if any(draft.token_ids for draft in drafts) else self._num_without + 1
        if self._num_without == _RETRY_STEPS:
            self._num_without = 0
            return self._likeliest(requests, 0.0, 1 if spare_s > 0.0 else 0)
        return drafts

    def learn(self, request: Request, scheduled: ScheduledRequest, sampled: Sequence[int], num_accepted: int) -> None:
        """Learns what the step sampled for a request, and how many of its draft tokens were accepted."""
        self.num_drafts += scheduled.num_drafts
        self.num_accepted += num_accepted
        if scheduled.num_wanted:
            forbidden = [_NO_TOKEN] if scheduled.num_wanted > scheduled.num_drafts else []  # by a grammar
            self._draft_lengths.learn(request, [*scheduled.draft, *forbidden], sampled)

    def on_step(self, num_drafts: int) -> None:
        """Learns that a step that verified `num_drafts` draft tokens was timed."""
        self._trusted = min(max(self._trusted, 2 * num_drafts), _MOST)

    def _likeliest(self, requests: Sequence[Request], min_chance: float, limit: int) -> list[Draft]:
        if limit == 0 or min_chance >= 1.0:
            return [NO_DRAFT] * len(requests)
        return _best_prefixes([self._draft_of(request) for request in requests], min_chance, limit)

    def _draft_of(self, request: Request) -> Draft:
        most = min(self._max_tokens, request.max_draft_tokens)
        return request.drafter.draft(request.prompt_token_ids, request.output_token_ids, most)


def _best_prefixes(drafts: Sequence[Draft], min_chance: float, limit: int) -> list[Draft]:
    """Returns a prefix of each draft: together at most `limit` tokens, those with the best chances to be accepted with
    all before them, and none whose chance is `min_chance` or less."""
    chances = (
        (draft.chance ** (index + 1), number)
        for number, draft in enumerate(drafts)
        for index in range(len(draft.token_ids))
    )
    worthy = sorted((each for each in chances if each[0] > min_chance), reverse=True)
    counts = Counter(number for _, number in worthy[:limit])
    return [Draft(draft.token_ids[: counts[number]], draft.chance) for number, draft in enumerate(drafts)]
