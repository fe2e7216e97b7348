"""Which of two drafts is proposed: that of forced tokens, or another drafter's."""

from collections.abc import Sequence

import pytest

from engine.core.draft import Draft
from engine.scheduling.speculation.grammar_drafter import GrammarDrafter


class Other:
    """A drafter that always proposes the same, and counts its calls."""

    def __init__(self, *token_ids: int, chance: float = 0.8) -> None:
        self.proposed = Draft(token_ids, chance)
        self.num_asked = 0

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        self.num_asked += 1
        return Draft(self.proposed.token_ids[:max_tokens], self.proposed.chance)


def forced(output: Sequence[int], max_tokens: int) -> Sequence[int]:
    """Returns three forced tokens after every ten tokens."""
    return [11, 12, 13][len(output) % 10 :][:max_tokens]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Other(), [11, 12, 13]),
        (Other(1, 2), [11, 12, 13]),
        (Other(1, 2, 3, 4, 5), [1, 2, 3, 4, 5]),
        (Other(1, 2, 3, 4, 5, chance=0.5), [11, 12, 13]),
        (Other(1, 2, chance=1.0), [1, 2]),
    ],
)
def test_the_draft_with_more_expected_tokens_is_proposed(other: Other, expected: list[int]) -> None:
    drafter = GrammarDrafter(forced, other)
    assert list(drafter.draft([], [], 8).token_ids) == expected
    assert list(drafter.draft([], [0] * 5, 8).token_ids) == list(other.proposed.token_ids)
    assert other.num_asked == 2  # it learns from every token


def test_no_more_than_max_tokens_are_proposed() -> None:
    assert list(GrammarDrafter(forced, Other()).draft([], [], 2).token_ids) == [11, 12]


@pytest.mark.parametrize(("num_wrong", "num_looked_for"), [(0, 10), (2, 4), (5, 2), (20, 1)])
def test_no_more_is_looked_for_than_is_likely(num_wrong: int, num_looked_for: int) -> None:
    """As many tokens are asked for as powers of 0.8, 0.58, 0.35 and 0.03 are above 0.1, but at least one: without any,
    nothing would be learnt."""
    looked_for = []

    def forced(output: Sequence[int], max_tokens: int) -> Sequence[int]:
        looked_for.append(max_tokens)
        return [1][:max_tokens]

    drafter = GrammarDrafter(forced, Other())
    for length in range(num_wrong):
        drafter.draft([], [0] * length, 64)
    drafter.draft([], [0] * num_wrong, 64)
    assert looked_for[-1] == num_looked_for
    assert list(drafter.draft([], [0] * num_wrong, 0).token_ids) == [] and looked_for[-1] == 0


def test_how_often_it_is_right_is_learnt_up_to_the_first_error() -> None:
    drafter = GrammarDrafter(forced, Other())
    first = drafter.draft([], [], 8).chance
    right = drafter.draft([], [11, 12, *[0] * 8], 8).chance  # one error
    assert right == pytest.approx((first + 2 * 0.15 * (1 - first)) * 0.85, abs=0.02)
    assert drafter.draft([], [11, 12, *[0] * 8, 1, *[0] * 9], 8).chance == pytest.approx(0.85 * right)
    assert drafter.draft([], [*[0] * 20, 11, 12, 13, *[0] * 7], 8).chance > right * 0.85
