"""Which of several drafts is proposed."""

from collections.abc import Sequence

import pytest

from engine.core.draft import Draft
from engine.scheduling.speculation.likeliest_drafter import LikeliestDrafter


class Always:
    """A drafter that always proposes the same, and counts its calls."""

    def __init__(self, *token_ids: int, chance: float = 0.8) -> None:
        self.proposed = Draft(token_ids, chance)
        self.num_asked = 0

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        self.num_asked += 1
        return Draft(self.proposed.token_ids[:max_tokens], self.proposed.chance)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (Always(), [11, 12, 13]),
        (Always(1, 2), [11, 12, 13]),
        (Always(1, 2, 3), [11, 12, 13]),  # equally good
        (Always(1, 2, 3, 4, 5), [1, 2, 3, 4, 5]),
        (Always(1, 2, 3, 4, 5, chance=0.5), [11, 12, 13]),
        (Always(1, 2, chance=1.0), [1, 2]),
    ],
)
def test_the_draft_with_more_expected_tokens_is_proposed(second: Always, expected: list[int]) -> None:
    first = Always(11, 12, 13)
    assert list(LikeliestDrafter([first, second]).draft([], [], 8).token_ids) == expected
    assert (first.num_asked, second.num_asked) == (1, 1)  # each learns from every token
