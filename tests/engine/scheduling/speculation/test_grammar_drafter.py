"""Drafts of what a grammar forces."""

from collections.abc import Sequence

import pytest

from engine.scheduling.speculation.grammar_drafter import GrammarDrafter


def forced(output: Sequence[int], max_tokens: int) -> Sequence[int]:
    """Returns three forced tokens after every ten tokens."""
    return [11, 12, 13][len(output) % 10 :][:max_tokens]


def test_forced_tokens_are_proposed() -> None:
    drafter = GrammarDrafter(forced)
    assert list(drafter.draft([], [], 8).token_ids) == [11, 12, 13]
    assert list(drafter.draft([], [0] * 5, 8).token_ids) == []


def test_no_more_than_max_tokens_are_proposed() -> None:
    assert list(GrammarDrafter(forced).draft([], [], 2).token_ids) == [11, 12]


@pytest.mark.parametrize(("num_wrong", "num_looked_for"), [(0, 10), (2, 4), (5, 2), (20, 1)])
def test_no_more_is_looked_for_than_is_likely(num_wrong: int, num_looked_for: int) -> None:
    """As many tokens are asked for as powers of 0.8, 0.58, 0.35 and 0.03 are above 0.1, but at least one: without any,
    nothing would be learnt."""
    looked_for = []

    def forced(output: Sequence[int], max_tokens: int) -> Sequence[int]:
        looked_for.append(max_tokens)
        return [1][:max_tokens]

    drafter = GrammarDrafter(forced)
    for length in range(num_wrong):
        drafter.draft([], [0] * length, 64)
    drafter.draft([], [0] * num_wrong, 64)
    assert looked_for[-1] == num_looked_for
    assert list(drafter.draft([], [0] * num_wrong, 0).token_ids) == [] and looked_for[-1] == 0


def test_how_often_it_is_right_is_learnt_up_to_the_first_error() -> None:
    drafter = GrammarDrafter(forced)
    first = drafter.draft([], [], 8).chance
    right = drafter.draft([], [11, 12, *[0] * 8], 8).chance  # one error
    assert right == pytest.approx((first + 2 * 0.15 * (1 - first)) * 0.85, abs=0.02)
    assert drafter.draft([], [11, 12, *[0] * 8, 1, *[0] * 9], 8).chance == pytest.approx(0.85 * right)
    assert drafter.draft([], [*[0] * 20, 11, 12, 13, *[0] * 7], 8).chance > right * 0.85
