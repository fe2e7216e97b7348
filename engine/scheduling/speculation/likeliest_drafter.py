"""Several drafters of one request as one; torch-free."""

from collections.abc import Sequence
from operator import attrgetter

from engine.core.draft import Draft, Drafter


class LikeliestDrafter:
    """Proposes the draft of which most tokens are expected to be accepted. It asks all drafters each time: they learn
    from every token."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        """The first of the drafters whose drafts are equally good is taken."""
        self._drafters = drafters

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        return max(
            (drafter.draft(prompt, output, max_tokens) for drafter in self._drafters), key=attrgetter("num_expected")
        )
