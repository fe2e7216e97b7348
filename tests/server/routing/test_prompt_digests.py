"""Digests of request bodies: equal beginnings have equal digests, and nobody shares those of others."""

from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.routing.prompt_digests import MAX_PIECES, PIECE_BYTES, routed_prompt

TEXT = "x" * PIECE_BYTES
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=9,
)


def messages(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content} for content in contents]


def num_shared(one: dict[str, Any], other: dict[str, Any], *callers: str) -> int:
    """Returns how many digests two bodies begin with alike."""
    of_one, of_other = routed_prompt(one, *callers[:1]), routed_prompt(other, *callers[1:])
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(of_one.digests, of_other.digests, strict=False))))


def test_a_longer_conversation_begins_with_the_digests_of_a_shorter_one() -> None:
    short, long = messages(TEXT, TEXT), messages(TEXT, TEXT, "more", TEXT)
    assert num_shared({"messages": short}, {"messages": long}) == len(routed_prompt({"messages": short}).digests) == 2


@pytest.mark.parametrize("name", ["tools", "system", "instructions"])
def test_what_stands_before_the_conversation_comes_first(name: str) -> None:
    body = {"messages": messages(TEXT), name: [TEXT]}
    assert num_shared(body, {"messages": messages("another"), name: [TEXT]}) == 1
    assert num_shared(body, {"messages": messages(TEXT), name: ["another"]}) == 0


@pytest.mark.parametrize("name", ["input", "prompt"])
def test_every_api_has_its_conversation(name: str) -> None:
    assert len(routed_prompt({name: TEXT * 3}).digests) == 3
    assert len(routed_prompt({name: [1234] * PIECE_BYTES}).digests) == 4


@pytest.mark.parametrize(
    "other", [{"model": "b"}, {"cache_salt": "b"}, {"cache_salt": None, "model": "a", "prompt": "y" + TEXT}]
)
def test_prompts_that_share_no_cache_share_no_digest(other: dict[str, Any]) -> None:
    body = {"model": "a", "cache_salt": "a", "prompt": TEXT}
    assert num_shared(body, body) == 1
    assert num_shared(body, body | other) == 0


def test_callers_share_neither_digests_nor_keys() -> None:
    body = {"prompt": TEXT, "prompt_cache_key": "k"}
    assert num_shared(body, body, "a", "a") == 1
    assert num_shared(body, body, "a", "b") == 0
    assert routed_prompt(body, "a").key != routed_prompt(body, "b").key
    assert routed_prompt({"prompt": TEXT}, "a").key == ""


def test_order_of_fields_in_messages_does_not_count() -> None:
    one, other = ({"role": "user", "content": TEXT}, {"content": TEXT, "role": "user"})
    assert num_shared({"messages": [one]}, {"messages": [other]}) == 1


def test_a_huge_prompt_has_a_bounded_number_of_digests() -> None:
    routed = routed_prompt({"prompt": "x" * (PIECE_BYTES * MAX_PIECES + 9 * PIECE_BYTES)})
    assert len(routed.digests) == MAX_PIECES
    assert routed.num_tokens > MAX_PIECES * routed.piece_tokens


@given(body=st.dictionaries(st.sampled_from(["messages", "tools", "prompt_cache_key", "model", "x"]), json_values))
def test_any_body_will_do(body: dict[str, Any]) -> None:
    routed = routed_prompt(body)
    assert routed == routed_prompt(body) and routed.num_tokens >= 1
    assert routed.uncached(len(routed.digests)) >= 1
