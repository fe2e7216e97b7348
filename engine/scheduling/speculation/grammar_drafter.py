"""Jump-forward decoding: drafts of what a grammar leaves no choice about, such as keys and brackets of JSON;
torch-free."""

from collections.abc import Callable, Sequence

from engine.core.draft import Draft
from engine.scheduling.speculation.prompt_lookup import updated_chance

_FIRST_CHANCE = 0.8  # the text is certain; only its tokens are not
_LEAST_CHANCE = 0.1  # that a token is accepted with all before it: to find less likely ones takes time, too


class GrammarDrafter:
    """Proposes the tokens that a request's grammar forces."""

    def __init__(self, forced_tokens: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        """`forced_tokens(output, max_tokens)` returns the likeliest tokens after an output, as far as their text is
        certain."""
        self._forced_tokens = forced_tokens
        self._forced: Sequence[int] = ()
        self._num_output = 0  # tokens before the forced ones
        self._chance = _FIRST_CHANCE

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        self._chance = updated_chance(self._chance, self._forced, output[self._num_output :])
        num_likely = sum(self._chance ** (index + 1) >= _LEAST_CHANCE for index in range(max_tokens))
        self._forced = self._forced_tokens(output, min(max(num_likely, 1), max_tokens))  # with none, nothing is learnt
        self._num_output = len(output)
        return Draft(self._forced, self._chance)
