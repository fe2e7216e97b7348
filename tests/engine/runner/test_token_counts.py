"""Counts that are kept from step to step are those of counting anew, whatever was drafted in between."""

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.token_counts import CountCache, TokenCounts
from tests.engine.runner.sampled import scheduled

TOKENS = st.lists(st.integers(0, 9), max_size=6)


def as_counter(found: tuple[np.ndarray, np.ndarray]) -> dict[int, float]:
    ids, counts = found
    assert len(set(ids.tolist())) == len(ids)
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def counted(prompt: list[int], output: list[int]) -> dict[int, float]:
    return {**dict.fromkeys(prompt, 0.0), **Counter(output)}


@given(prompt=TOKENS, steps=st.lists(st.tuples(TOKENS, TOKENS), max_size=8))
def test_drafts_are_counted_and_forgotten(prompt: list[int], steps: list[tuple[list[int], list[int]]]) -> None:
    """A step looks at the output with each of its draft tokens, in lists of their own, and then the output grows."""
    counts, output = TokenCounts(prompt), list[int]()
    for drafts, tokens in steps:
        for end in range(len(drafts)):
            row = [*output, *drafts[:end]]
            assert as_counter(counts.of(row)) == counted(prompt, row)
        output.extend(tokens)
        assert as_counter(counts.of(output)) == counted(prompt, output)


def test_new_tokens_alone_are_looked_at() -> None:
    """The list is that of the last step: only what it has grown by is counted."""
    counts, output = TokenCounts([1]), [2, 3]
    counts.of(output)
    output[0] = 9  # no request does that; it shows what is read
    output.append(3)
    assert as_counter(counts.of(output)) == {1: 0.0, 2: 1.0, 3: 2.0}


def test_many_tokens_find_room() -> None:
    counts, output = TokenCounts([]), list(range(1000))
    assert as_counter(counts.of(output)) == counted([], output)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1), TOKENS), max_size=12))
def test_requests_are_told_apart(asked: list[tuple[str, int, list[int]]]) -> None:
    """Of two requests the counts are kept here, a third one's are made anew; names come back with another prompt."""
    cache, prompts = CountCache(2), [[1, 2], [2, 3, 3]]
    for name, prompt, output in asked:
        request = replace(scheduled(prompt=prompts[prompt], output=output), request_id=name)
        assert as_counter(cache.counts_of(request)) == counted(prompts[prompt], output)
