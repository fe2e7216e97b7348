"""Decode steps that compute guessed tokens, too, and keep those that are right; torch-free.

A guess is right if it is the token that is chosen at its position anyhow, greedy or sampled (Leviathan et al. 2023, by
exact match). So guesses make an answer faster and never another one. Where a step waits for memory, which a few more
tokens do not make it read, a wrong guess costs little.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.batch import ScheduledRequest
from engine.request import Request
from engine.step_cost import StepCosts

__all__ = ["Speculation", "num_right", "rows_of"]


_MARGIN = 2.0  # guesses of one request lengthen the step of all: they must be worth it twice


class Speculation:
    """How many tokens each request of a decode step guesses: those that are likely enough to pay for their time."""

    def __init__(self, costs: StepCosts, max_tokens: int) -> None:
        """`max_tokens` per request and step."""
        self._costs = costs
        self._max_tokens = max_tokens
        self.num_drafts = 0
        self.num_accepted = 0

    def draft(self, requests: Sequence[Request]) -> list[Sequence[int]]:
        """The tokens that each of these guesses: the step itself makes one more, and no request may say too many."""
        min_chance = _MARGIN * self._costs.chance_that_pays(requests)
        if min_chance >= 1.0:
            return [()] * len(requests)
        return [self._draft(request, min_chance) for request in requests]

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """What became of a request's drafts."""
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted

    def _draft(self, request: Request, min_chance: float) -> Sequence[int]:
        num_left = request.params.max_tokens - len(request.output_token_ids) - 1
        most = min(self._max_tokens, num_left)
        return request.drafter.draft(request.prompt_token_ids, request.output_token_ids, most, min_chance)


def rows_of(request: ScheduledRequest) -> Iterator[ScheduledRequest]:
    """A decode step's request as one for each of its tokens: as if the guesses before had been said already."""
    if request.num_drafts == 0:
        yield request
        return
    for index, token_id in enumerate(request.token_ids):
        output = [*request.output_token_ids, *request.token_ids[1 : index + 1]]
        start = request.start + index
        yield replace(request, token_ids=(token_id,), start=start, output_token_ids=output, num_drafts=0)


def num_right(request: ScheduledRequest, chosen: Sequence[int | None]) -> int:
    """How many of the request's guesses are what was `chosen`, one for each of its tokens, up to the first that is
    not."""
    guesses = request.token_ids[len(request.token_ids) - request.num_drafts :]
    pairs = zip(guesses, chosen, strict=False)
    return next((index for index, (guess, token) in enumerate(pairs) if guess != token), len(guesses))
