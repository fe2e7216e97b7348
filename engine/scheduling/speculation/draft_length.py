"""The draft length: how many tokens the draft model drafts for each request before a decode step; torch-free.

Each pass of the draft model makes one draft token more for every request, and takes its time whether that is accepted
or not. Of those numbers of passes that make no request slower than it would be without, the one that brings most tokens
a second is chosen. The gap that passes make is bounded as it is for prompts of other requests: see
`engine.scheduling.prefill_budget`. The acceptance rate is learnt for each request, and the time of a pass is measured.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.core.draft import Draft
from engine.core.request import Request
from engine.scheduling.cost.step_cost import StepCosts, TokenPrice
from engine.scheduling.speculation.prompt_lookup import updated_chance

_FIRST_CHANCE, _MOST_CHANCE = 0.8, 0.99
_LEARNING = 0.05  # weight of one draft token: with too much, a few rejections in a row would end all drafting
_FIRST_STEPS = 4  # with one pass each, whatever it seems to take: the first may be an outlier
_LONGEST = 3.0  # times a step without passes that one with them may last, if that is longer than the target gap
_MARGIN = 1.05  # times the tokens a second without passes: predictions err
_RETRY_STEPS = 100  # without a pass: its measured time may be an outlier, and chances change


class DraftLengthPolicy(Protocol):
    """Decides how many draft tokens the draft model makes for each request of a step, and learns how many were accepted
    before."""

    def plan(self, requests: Sequence[Request], drafts: Sequence[Draft], price: TokenPrice) -> Sequence[int]:
        """Returns the draft length of each request; zeros where the draft model brings no more tokens a second than
        `drafts`, which do not need it."""

    def learn(self, request: Request, draft: Sequence[int], sampled: Sequence[int]) -> None:
        """Learns what was sampled where the draft model had proposed `draft`."""


class NoDraftModel:
    """The policy where there is no draft model: it drafts nothing."""

    def plan(self, requests: Sequence[Request], drafts: Sequence[Draft], price: TokenPrice) -> Sequence[int]:
        return ()

    def learn(self, request: Request, draft: Sequence[int], sampled: Sequence[int]) -> None:
        pass


class FastestDraftLength:
    """Chooses the draft lengths that bring most tokens a second."""

    def __init__(self, costs: StepCosts, max_tokens: int, target_gap_s: float) -> None:
        """`max_tokens` limits the draft of one request in one step."""
        self._costs = costs
        self._max_tokens = max_tokens
        self._target_gap_s = target_gap_s
        self._chance = _FIRST_CHANCE  # of requests without a verified draft
        self._num_without = 0  # steps in a row

    def plan(self, requests: Sequence[Request], drafts: Sequence[Draft], price: TokenPrice) -> list[int]:
        return self.lengths(requests, _rate(drafts, price), price)

    def lengths(self, requests: Sequence[Request], rate: float, price: TokenPrice) -> list[int]:
        """Returns the draft length of each request; zeros where they bring no more than `rate` tokens a second."""
        if self._costs.num_drafting_steps < _FIRST_STEPS:
            lengths = self._one_each(requests, price)
        elif self._num_without >= _RETRY_STEPS:
            lengths = self._one_alone(requests, price)
        else:
            lengths = self._best(requests, rate * _MARGIN, price)
        self._num_without = 0 if any(lengths) else self._num_without + 1
        return lengths

    def learn(self, request: Request, draft: Sequence[int], sampled: Sequence[int]) -> None:
        request.draft_acceptance = updated_chance(request.draft_acceptance or self._chance, draft, sampled, _LEARNING)
        self._chance = updated_chance(self._chance, draft, sampled, _LEARNING)

    def _chances(self, requests: Sequence[Request]) -> list[float]:
        """Returns each request's chance that a draft token is accepted if those before it are; 0 for requests that may
        not speculate."""
        chances = (request.draft_acceptance or self._chance if request.may_speculate else 0.0 for request in requests)
        return [min(chance, _MOST_CHANCE) for chance in chances]

    def _one_each(self, requests: Sequence[Request], price: TokenPrice) -> list[int]:
        """Returns lengths of one, to learn the time of a pass; zeros before the time of a step is known."""
        return _lengths(1 if price.step_s else 0, requests, self._chances(requests))

    def _one_alone(self, requests: Sequence[Request], price: TokenPrice) -> list[int]:
        """Returns a length of one for the request of whose tokens the draft model lacks fewest: it has to make up for
        what it did not read while it drafted nothing, which takes longer than the pass."""
        lengths = self._one_each(requests, price)
        asked = [index for index, length in enumerate(lengths) if length]
        chosen = min(asked, key=lambda index: _num_lacking(requests[index]), default=None)
        return [length if index == chosen else 0 for index, length in enumerate(lengths)]

    def _best(self, requests: Sequence[Request], rate: float, price: TokenPrice) -> list[int]:
        """Returns the lengths that bring most tokens a second. That rate rises with the first passes and falls then, so
        its first maximum is the only one."""
        pass_s = self._costs.drafting_price(requests)
        chances, longest_s = self._chances(requests), max(self._target_gap_s, _LONGEST * price.step_s)
        best, best_rate = [0] * len(requests), 0.0
        for num_passes in range(1, self._max_tokens + 1):
            lengths = _lengths(num_passes, requests, chances)
            seconds = price.seconds(lengths) + num_passes * pass_s
            expected = [_num_expected(chance, length) for chance, length in zip(chances, lengths, strict=True)]
            slowed = any(
                num < seconds / price.step_s and request.max_draft_tokens >= num_passes
                for num, request in zip(expected, requests, strict=True)
            )
            if slowed or seconds > longest_s or sum(expected) / seconds <= best_rate:
                break
            best, best_rate = lengths, sum(expected) / seconds
        return best if best_rate > rate else [0] * len(requests)


def _rate(drafts: Sequence[Draft], price: TokenPrice) -> float:
    """Returns the expected tokens a second of a step with these drafts, one per request; 0 if its time is unknown."""
    seconds = price.seconds(len(draft.token_ids) for draft in drafts)
    return (len(drafts) + sum(draft.num_expected for draft in drafts)) / seconds if seconds else 0.0


def _lengths(num_passes: int, requests: Sequence[Request], chances: Sequence[float]) -> list[int]:
    pairs = zip(requests, chances, strict=True)
    return [min(num_passes, request.max_draft_tokens) if chance else 0 for request, chance in pairs]


def _num_lacking(request: Request) -> int:
    return request.num_computed_tokens - request.num_drafted_tokens


def _num_expected(chance: float, length: int) -> float:
    """Returns the expected tokens that a step with `length` draft tokens brings a request."""
    return (1.0 - chance ** (length + 1)) / (1.0 - chance)
