"""Prefixes of JSON in pieces: each piece gets the verdict of the whole text, although most of it is forgotten."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.tools import json_beginning
from server.tools.json_beginning import JsonBeginning, begins_json, shortened
from tests.fuzz import fuzz

pytestmark = pytest.mark.fuzz

CHARACTERS = '{}[],:"\\u0d8c1.-e \nté𝄞\0'
FRAGMENTS = [*CHARACTERS, '{"', '":', '",', "],", "},", "\\ud834", "\\udd1e", "\\u00e9", '\\"', "true", '[1, "b"]']
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from(CHARACTERS), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
documents = st.builds(json.dumps, values, ensure_ascii=st.booleans(), indent=st.sampled_from([None, 1]))
soup = st.lists(st.sampled_from(FRAGMENTS), max_size=20).map("".join)
openings = st.lists(st.sampled_from(["{", "[", '{"a":', "[1, ", '{"a": "']), max_size=3).map("".join)
texts = st.tuples(openings, documents, soup, documents | soup).map("".join)


@fuzz(300)
@given(texts, st.integers(1, 9), st.integers(0, 30))
def test_pieces_get_the_verdict_of_the_whole_text(text: str, size: int, kept_chars: int) -> None:
    beginning = JsonBeginning(kept_chars)
    for end in range(size, len(text) + size, size):
        expected = begins_json(text[:end])
        assert beginning.add(text[end - size : end]) == expected
        if not expected:
            break


@fuzz(300)
@given(texts, texts)
@example('[{"a": [1}', ",1")
@example('["\\u', "zzzz")
@example('["\\u1"]', "x")
@example('["\\ud834\\', "udd1e")
@example("[0 ", "1")
def test_what_is_short_goes_on_as_what_was_long(text: str, more: str) -> None:
    begun = max(end for end in range(len(text) + 1) if end == 0 or begins_json(text[:end]))
    if begun:
        for end in range(len(more) + 1):
            rest = text[begun:] + more[:end]
            assert begins_json(text[:begun] + rest) == begins_json(shortened(text[:begun]) + rest)


@pytest.mark.parametrize("opening", ["[", '{"a":', "[1,", '[{"a":1,"b":'])
def test_depth_is_not_forgotten(opening: str) -> None:
    beginning, depth = JsonBeginning(kept_chars=10), 0
    while begins_json(opening * (depth + 1)):
        depth += 1
        assert beginning.add(opening)
    assert depth >= 50 and not beginning.add(opening)


@pytest.mark.parametrize("item", ['"a", ', "[1, [2.5]], ", '{"a": {"b": null}}, ', "a text", "\\u4e2d\\n", "   "])
def test_what_is_settled_is_not_read_again(item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0

    def count(text: str) -> bool:
        nonlocal num_read
        num_read += len(text)
        return begins_json(text)

    monkeypatch.setattr(json_beginning, "begins_json", count)
    beginning, num_pieces = JsonBeginning(), 3000
    assert beginning.add('{"a": [' + '"' * (item[0] in "a\\"))
    assert all(beginning.add(item) for _ in range(num_pieces))
    assert num_read < 2000 * num_pieces
