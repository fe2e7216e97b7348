"""Prompt lookup drafts what followed the newest tokens before, and learns how often that is accepted."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.draft import NoDrafts
from engine.scheduling.speculation.prompt_lookup import PromptLookup

TOKENS = st.sampled_from([0, 1, 256, 65_536, 0x01010101])  # their bytes look alike across borders


def drafted(prompt: Sequence[int], output: Sequence[int] = (), max_tokens: int = 4) -> list[int]:
    return list(PromptLookup().draft(prompt, output, max_tokens).token_ids)


def expected(text: Sequence[int], max_tokens: int) -> list[int]:
    """Returns the draft that a search of every position finds."""
    for length in (4, 3, 2):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[len(text) - length :]:
                longer = list(text)
                for i in range(max_tokens):
                    longer.append(longer[start + length + i])
                return longer[len(text) :]
    return []


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 9, 1, 2, 7, 8, 1, 2], [7, 8, 1, 2]),  # where they stood last
        ([5, 1, 2, 3, 6, 1, 2, 7, 5, 1, 2], [3, 6, 1, 2]),  # but rather where more of them stood
        ([7, 7, 7], [7, 7, 7, 7]),  # goes on to repeat itself
        ([9, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3, 4], []),
        ([1, 1], []),
        ([], []),
    ],
)
def test_what_followed_the_newest_tokens_before_is_drafted(text: list[int], draft: list[int]) -> None:
    assert drafted(text) == draft
    for cut in range(len(text)):
        assert drafted(text[:cut], text[cut:]) == draft


@given(text=st.lists(TOKENS, max_size=40), max_tokens=st.integers(0, 6))
def test_it_finds_what_a_search_of_every_place_finds(text: list[int], max_tokens: int) -> None:
    assert drafted(text, max_tokens=max_tokens) == expected(text, max_tokens)


@given(text=st.lists(st.integers(0, 3), max_size=60), cuts=st.lists(st.integers(0, 60), max_size=5))
def test_a_text_may_grow_by_any_number_of_tokens(text: list[int], cuts: list[int]) -> None:
    grown = PromptLookup()
    for cut in sorted(cuts):
        grown.draft(text[:2], text[2:cut], 3)
    assert list(grown.draft(text[:2], text[2:], 3).token_ids) == drafted(text, max_tokens=3)


def test_it_does_not_look_back_for_ever() -> None:
    filler = [*range(100, 10_100)]
    assert drafted([1, 2, 3, 4, *filler[:100], 1, 2]) == [3, 4, 100, 101]
    assert drafted([1, 2, 3, 4, *filler, 1, 2]) == []


def test_the_chance_rises_with_right_drafts_and_falls_with_wrong_ones() -> None:
    lookup, text = PromptLookup(), [1, 2, 3] * 3
    assert lookup.draft(text, [], 8).chance == 0.5
    for number in range(40):
        text.append(number % 3 + 1)
        draft = lookup.draft(text, [], 8)
    assert draft.chance > 0.99
    rng = random.Random(0)
    for _ in range(200):
        text.append(rng.randrange(3) + 1)
        draft = lookup.draft(text, [], 8)
    assert draft.chance < 0.6


def test_nothing_of_a_draft_counts_after_its_first_error() -> None:
    chances = []
    for output in ([9, 4], [9, 5], [9]):  # where 3, 4 was the draft
        lookup, text = PromptLookup(), [1, 2, 3, 4, 1, 2]
        lookup.draft(text, [], 2)
        lookup.draft(text, output, 2)
        chances.append(lookup._chances)
    assert chances[0] == chances[1] == chances[2] != PromptLookup()._chances


def test_nothing_is_drafted_when_off() -> None:
    assert list(NoDrafts().draft([1, 1, 1, 1], [], 8).token_ids) == []
