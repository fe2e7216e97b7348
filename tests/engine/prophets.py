"""Drafters that know what will be said, and err as they are told."""

from collections.abc import Callable, Sequence

from engine.drafter import Draft
from engine.engine import Engine
from engine.messages import AddRequest
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


def let_prophets_draft(
    engine: Engine,
    errs: Callable[[], bool] = lambda: False,
    tells: Callable[[Sequence[int], Sequence[int]], int] | None = None,
) -> None:
    """All requests that are added from now on have one."""

    def prophet_for(message: AddRequest) -> Prophet:
        return Prophet(tells or (lambda prompt, said: next_token([*prompt, *said], message.params.seed)), errs)

    engine._drafter_for = prophet_for  # type: ignore[method-assign]
