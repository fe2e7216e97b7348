"""Drafters that know which tokens will be sampled, and err on purpose."""

from collections.abc import Callable, Sequence
from typing import Any

from engine.core.batch import ScheduledRequest
from engine.core.draft import Draft
from engine.core.sampling_params import SamplingParams
from tests.engine.fakes import VOCAB_SIZE, next_token


class OracleDrafter:
    """Drafts what `follows` returns for a prompt and an output; `errs` decides which draft tokens are wrong."""

    def __init__(self, follows: Callable[[Sequence[int], Sequence[int]], int], errs: Callable[[], bool]) -> None:
        self._follows, self._errs = follows, errs

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        drafted = list(output)
        for _ in range(max_tokens):
            token_id = self._follows(prompt, drafted)
            drafted.append((token_id + 1) % VOCAB_SIZE if self._errs() else token_id)
        return Draft(drafted[len(output) :], 0.9)


def oracle_drafters(errs: Callable[[], bool] = lambda: False) -> Callable[[], OracleDrafter]:
    """Returns what makes drafters for requests to a FakeRunner."""
    return lambda: OracleDrafter(lambda prompt, output: next_token([*prompt, *output]), errs)


def scheduled(drafts: list[int], num_wanted: int = 0, **params: Any) -> ScheduledRequest:
    """Returns a request in a decode step with these draft tokens."""
    tokens, numbers = [7, *drafts], {"num_drafts": len(drafts), "num_wanted": num_wanted}
    return ScheduledRequest("a", tokens, 4, (0, 1), SamplingParams(**params), [1, 2, 3, 4], [7], True, **numbers)
