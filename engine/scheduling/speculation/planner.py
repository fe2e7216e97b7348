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
_LONGEST = 1.5  # times as long as without drafts may a request wait for its token, or for each that its draft brings it
_FIRST, _MOST = 8, 64  # draft tokens of one step: before any were tried, and ever
_NO_TOKEN = -1  # a draft token that is never sampled
_UNKNOWN = TokenPrice(0.0, 0.0)
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
        return [NO_PLANNED_DRAFT if draft is NO_DRAFT else PlannedDraft(draft.token_ids) for draft in drafts]

    def _drafts(self, requests: Sequence[Request], price: TokenPrice) -> list[Draft]:
        """Returns what is worth its time of the drafts that the requests' own drafters propose."""
        if _MARGIN * len(requests) * price.token_s > price.step_s > 0.0 and self._num_without + 1 < _RETRY_STEPS:
            self._num_without += 1  # not even a certain token would be worth it
            return [NO_DRAFT] * len(requests)
        proposed = [self._draft_of(request) for request in requests]
        if not any(draft.token_ids for draft in proposed):
            self._num_without = (self._num_without + 1) % _RETRY_STEPS
            return [NO_DRAFT] * len(requests)
        spare_s = self._longest_s(proposed, price) - price.step_s
        num_spare = int(max(spare_s - price.draft_s, 0.0) / price.token_s) if price.token_s else self._trusted
        drafts = _best_prefixes(proposed, price, min(num_spare, self._trusted))
        self._num_without = 0 if any(draft.token_ids for draft in drafts) else self._num_without + 1
        if self._num_without == _RETRY_STEPS:
            self._num_without = 0
            return _best_prefixes(proposed, _UNKNOWN, 1 if spare_s > 0.0 else 0)
        return drafts

    def _longest_s(self, proposed: Sequence[Draft], price: TokenPrice) -> float:
        """Returns the seconds that the step may take. The more tokens each request expects of it, the more these are:
        none waits much longer for its tokens than without drafts."""
        num_least = 1 + min(draft.num_expected for draft in proposed)
        return min(_LONGEST * price.step_s * num_least, self._target_gap_s)

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

    def _draft_of(self, request: Request) -> Draft:
        most = min(self._max_tokens, request.max_draft_tokens)
        return request.drafter.draft(request.asked.prompt_token_ids, request.output_token_ids, most)


def _best_prefixes(drafts: Sequence[Draft], price: TokenPrice, limit: int) -> list[Draft]:
    """Returns a prefix of each draft: together at most `limit` tokens, those with the best chances to be accepted with
    all before them, as long as each is worth its time and makes the step bring more tokens a second."""
    chances = (
        (draft.chance ** (index + 1), number)
        for number, draft in enumerate(drafts)
        for index in range(len(draft.token_ids))
    )
    likeliest = sorted((each for each in chances if each[0] > 0.0), reverse=True)
    counts, num_expected, seconds = Counter[int](), float(len(drafts)), price.step_s
    for chance, number in likeliest[:limit]:
        is_worth_it = chance * price.step_s >= _MARGIN * len(drafts) * price.token_s
        if not is_worth_it or chance * seconds < num_expected * price.token_s:
            break
        counts[number] += 1
        num_expected += chance
        seconds += price.token_s
    prefixes = [Draft(draft.token_ids[: counts[number]], draft.chance) for number, draft in enumerate(drafts)]
    return [each if _is_worth_it(each, price, len(drafts)) else NO_DRAFT for each in prefixes]


def _is_worth_it(draft: Draft, price: TokenPrice, num_requests: int) -> bool:
    """Whether a draft whose tokens are each worth their time is so with what it costs beside them."""
    draft_s = price.draft_s + len(draft.token_ids) * price.token_s
    return not price.draft_s or draft.num_expected * price.step_s >= _MARGIN * num_requests * draft_s
