"""Drafts of a predicted output: what the client says that the answer will mostly be, such as a file to be edited;
torch-free."""

from collections.abc import Sequence

from engine.core.draft import Draft
from engine.core.predicted_text import CERTAIN, PredictedText
from engine.scheduling.speculation.prompt_lookup import updated_chance

_FIRST_CHANCES = (0.0, 0.3, 0.6, 0.9)  # by the number of tokens in a row that followed the prediction
_LEARNING = 0.1


class PredictedOutput:
    """Drafts the prediction's tokens from the place that the output has reached in it. The chance of acceptance is
    learnt from every draft, and separately for each certainty of the place."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        assert len(_FIRST_CHANCES) == CERTAIN + 1
        self._predicted = PredictedText(token_ids)
        self._num_read = 0  # tokens of the output
        self._draft: list[int] = []
        self._chances = list(_FIRST_CHANCES)

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        new, certainty = output[self._num_read :], self._predicted.num_in_row
        self._chances[certainty] = updated_chance(self._chances[certainty], self._draft, new, _LEARNING)
        self._predicted.follow(new)
        self._num_read = len(output)
        self._draft = self._predicted.next_tokens(max_tokens)
        return Draft(self._draft, self._chances[self._predicted.num_in_row])
