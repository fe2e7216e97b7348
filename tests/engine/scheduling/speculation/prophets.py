"""Drafters that know what will be said, and err as they are told."""

from collections.abc import Callable, Sequence
from typing import Any

from engine.core.batch import ScheduledRequest
from engine.core.draft import Draft
from engine.core.sampling_params import SamplingParams
from tests.engine.fakes import VOCAB_SIZE, next_token


class Prophet:
    """`tells` the token that comes after a prompt and an output; `errs` says which guesses are wrong."""

    def __init__(self, tells: Callable[[Sequence[int], Sequence[int]], int], errs: Callable[[], bool]) -> None:
        self._tells, self._errs = tells, errs

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        said = list(output)
        for _ in range(max_tokens):
            token_id = self._tells(prompt, said)
            said.append((token_id + 1) % VOCAB_SIZE if self._errs() else token_id)
        return Draft(said[len(output) :], 0.9)


def prophets(errs: Callable[[], bool] = lambda: False) -> Callable[[], Prophet]:
    """For requests to a FakeRunner."""
    return lambda: Prophet(lambda prompt, said: next_token([*prompt, *said]), errs)


def scheduled(drafts: list[int], num_wanted: int = 0, **params: Any) -> ScheduledRequest:
    """In a decode step with these guesses."""
    tokens, numbers = [7, *drafts], {"num_drafts": len(drafts), "num_wanted": num_wanted}
    return ScheduledRequest("a", tokens, 4, (0, 1), SamplingParams(**params), [1, 2, 3, 4], [7], True, **numbers)
