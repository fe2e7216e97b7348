"""The text of a custom tool's call, out of its arguments."""

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from server.responses.custom_input import CustomInput

TEXTS = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from('"\\\n\t/u🐙')))


def read(arguments: str, cuts: list[int]) -> str:
    reader, edges = CustomInput(), sorted({0, len(arguments), *(cut % (len(arguments) + 1) for cut in cuts)})
    return "".join(reader.feed(arguments[a:b]) for a, b in itertools.pairwise(edges))


@given(TEXTS, st.booleans(), st.lists(st.integers(0, 10_000)), st.sampled_from([(", ", ": "), (" ,", "\n:\t")]))
def test_the_text_is_the_same_however_its_arguments_are_written_and_cut(
    text: str, is_ascii: bool, cuts: list[int], separators: tuple[str, str]
) -> None:
    arguments = json.dumps({"input": text, "more": 1}, ensure_ascii=is_ascii, separators=separators)
    assert read(arguments, cuts) == text


@given(st.lists(st.integers(0, 10_000)))
def test_arguments_of_another_form_are_the_text(cuts: list[int]) -> None:
    for arguments in ("{}", '{"text": "a"}', '{"input": 3}', "*** Begin", '{"in put": "a"}'):
        assert read(arguments, cuts) == arguments


@given(st.lists(st.integers(0, 10_000)))
def test_what_json_does_not_have_is_kept_or_replaced(cuts: list[int]) -> None:
    assert read('{"input": "a\\qb\nc\\ud83dd\\udc19"}', cuts) == "a\\qb\nc?d?"


@given(TEXTS, st.integers(0, 10_000))
def test_a_text_that_is_cut_is_a_beginning_of_the_text(text: str, cut: int) -> None:
    arguments = json.dumps({"input": text})
    assert text.startswith(read(arguments[: cut % len(arguments)], []))
