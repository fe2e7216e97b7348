"""How many tokens the draft weights guess before a decode step; torch-free.

Each pass of theirs is a guess more for every request, and takes its time whether the guess is right or not. As many are
made as bring most tokens a second, of those numbers that make no request slower than it would be without. The gap that
they make is bounded as by prompts of others: see `engine.scheduling.prefill_budget`. How often guesses are right is
learnt for each request, and what the passes take is measured.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.core.draft import Draft
from engine.core.request import Request
from engine.scheduling.cost.step_cost import StepCosts, TokenPrice
from engine.scheduling.speculation.prompt_lookup import learnt

_FIRST_CHANCE, _MOST_CHANCE = 0.8, 0.99
_LEARNING = 0.05  # how much a guess says about the next ones: too much, and some errors in a row end them all
_FIRST_STEPS = 4  # with a pass each, whatever it seems to take: the first may be an accident
_LONGEST = 3.0  # steps without a pass that one with them may last, if that is longer than a gap should be
_MARGIN = 1.05  # times the tokens a second that there are without: predictions err
_RETRY_STEPS = 100  # without a pass: what one takes may be a mistake, and chances change


class DraftLengthPolicy(Protocol):
    """Says how many guesses of the draft weights each request of a step gets, and learns from what became of them."""

    def plan(self, requests: Sequence[Request], drafts: Sequence[Draft], price: TokenPrice) -> Sequence[int]:
        """For each of these; zeros where that brings no more tokens a second than `drafts`, which need no weights."""

    def learn(self, request: Request, guess: Sequence[int], said: Sequence[int]) -> None:
        """What became of a guess of the draft weights."""


class NoDraftModel:
    """Guesses nothing: there are no draft weights."""

    def plan(self, requests: Sequence[Request], drafts: Sequence[Draft], price: TokenPrice) -> Sequence[int]:
        return ()

    def learn(self, request: Request, guess: Sequence[int], said: Sequence[int]) -> None:
        pass


class FastestDraftLength:
    """Guesses as many as pay."""

    def __init__(self, costs: StepCosts, max_tokens: int, target_gap_s: float) -> None:
        """`max_tokens` per request and step."""
        self._costs = costs
        self._max_tokens = max_tokens
        self._target_gap_s = target_gap_s
        self._chance = _FIRST_CHANCE  # of requests that have tried none
        self._num_without = 0  # steps in a row

    def plan(self, requests: Sequence[Request], drafts: Sequence[Draft], price: TokenPrice) -> list[int]:
        return self.counts(requests, _rate(drafts, price), price)

    def counts(self, requests: Sequence[Request], rate: float, price: TokenPrice) -> list[int]:
        """For each of these; zeros where that brings no more than `rate` tokens a second."""
        is_due = self._costs.num_drafting_steps < _FIRST_STEPS or self._num_without >= _RETRY_STEPS
        counts = self._one_each(requests, price) if is_due else self._best(requests, rate * _MARGIN, price)
        self._num_without = 0 if any(counts) else self._num_without + 1
        return counts

    def learn(self, request: Request, guess: Sequence[int], said: Sequence[int]) -> None:
        request.draft_acceptance = learnt(request.draft_acceptance or self._chance, guess, said, _LEARNING)
        self._chance = learnt(self._chance, guess, said, _LEARNING)

    def _chances(self, requests: Sequence[Request]) -> list[float]:
        """That a guess is right, if those before it are; 0 for who does not guess."""
        chances = (request.draft_acceptance or self._chance if request.may_speculate else 0.0 for request in requests)
        return [min(chance, _MOST_CHANCE) for chance in chances]

    def _one_each(self, requests: Sequence[Request], price: TokenPrice) -> list[int]:
        """To learn what a pass takes; none before it is known what the step takes."""
        return _counts(1 if price.step_s else 0, requests, self._chances(requests))

    def _best(self, requests: Sequence[Request], rate: float, price: TokenPrice) -> list[int]:
        """More passes bring more tokens a second at first and fewer then, so the first best is the best."""
        step_s, token_s = price
        pass_s = self._costs.drafting_price(requests)
        chances, longest_s = self._chances(requests), max(self._target_gap_s, _LONGEST * step_s)
        best, best_rate = [0] * len(requests), 0.0
        for num_passes in range(1, self._max_tokens + 1):
            counts = _counts(num_passes, requests, chances)
            seconds = step_s + num_passes * pass_s + sum(counts) * token_s
            said = [_num_expected(chance, count) for chance, count in zip(chances, counts, strict=True)]
            slowed = any(
                num < seconds / step_s and request.max_draft_tokens >= num_passes
                for num, request in zip(said, requests, strict=True)
            )
            if slowed or seconds > longest_s or sum(said) / seconds <= best_rate:
                break
            best, best_rate = counts, sum(said) / seconds
        return best if best_rate > rate else [0] * len(requests)


def _rate(drafts: Sequence[Draft], price: TokenPrice) -> float:
    """Tokens a second that a step with these guesses brings, one of each request, as far as that is known."""
    seconds = price.step_s + price.token_s * sum(len(draft.token_ids) for draft in drafts)
    return (len(drafts) + sum(draft.num_expected for draft in drafts)) / seconds if seconds else 0.0


def _counts(num_passes: int, requests: Sequence[Request], chances: Sequence[float]) -> list[int]:
    pairs = zip(requests, chances, strict=True)
    return [min(num_passes, request.max_draft_tokens) if chance else 0 for request, chance in pairs]


def _num_expected(chance: float, count: int) -> float:
    """Tokens of a step with so many guesses."""
    return (1.0 - chance ** (count + 1)) / (1.0 - chance)
