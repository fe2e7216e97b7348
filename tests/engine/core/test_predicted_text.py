"""The place that an output has reached in its prediction, and how much of that has appeared."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.predicted_text import PredictedText

FILE = "def area(width, height):\n    # in square metres\n    return width * height\n\nprint(area(3, 4))\n"

texts = st.lists(st.integers(0, 3), max_size=40)


def ids(text: str) -> list[int]:
    return [*text.encode()]


def after(prediction: str, output: str) -> PredictedText:
    predicted = PredictedText(ids(prediction))
    predicted.follow(ids(output))
    return predicted


def text_of(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode()


def test_an_output_is_expected_to_begin_as_predicted() -> None:
    assert text_of(after(FILE, "").next_tokens(8)) == "def area"
    assert text_of(after(FILE, "def").next_tokens(5)) == " area"
    assert after(FILE, FILE).next_tokens(5) == []


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("def volume(wid", "th, height)"),  # replaced
        ("def area(width, height, depth=1):\n    # i", "n square metres"),  # inserted
        ("def area(width, height):\n    retu", "rn width * height"),  # left out
        ("Here it is:\n\ndef a", "rea(width"),  # preceded
        ("print(area(3, 4))\n\ndef area(w", "idth, height)"),  # moved
    ],
)
def test_behind_an_edit_the_prediction_is_found_again(output: str, expected: str) -> None:
    assert text_of(after(FILE, output).next_tokens(len(expected))) == expected


def test_of_equal_places_the_next_one_is_taken_and_of_others_the_one_with_most_in_common() -> None:
    loops = "a=1;b=2;if a:x();c=3;if a:x();d=4;if a:x();e=5;"
    assert text_of(after(loops, "a=1;b=2;if a:y();").next_tokens(3)) == "c=3"
    assert text_of(after(loops, "a=1;b=2;if a:x();c=3;if a:y();").next_tokens(3)) == "d=4"
    assert text_of(after(loops, "?d=4;if a:y();").next_tokens(3)) == "e=5"


def test_nothing_is_predicted_where_the_output_has_left_it() -> None:
    predicted = after(FILE, "def area?")
    assert (predicted.next_tokens(8), predicted.num_in_row) == ([], 0)


def test_fewer_than_three_tokens_in_a_row_are_no_appearance() -> None:
    assert after("abcdefgh", "xcdyefx").num_appeared == 0
    assert after("abcdefgh", "xcdeyefx").num_appeared == 3
    assert after("ab", "ab").num_appeared == 2  # but an output begins where the prediction does
    assert after("ab", "xab").num_appeared == 0


def test_each_token_appears_once() -> None:
    predicted = after("abcdef", "abcdef" * 3)
    assert (predicted.num_appeared, predicted.num_others) == (6, 0)


def test_an_edited_file_appears_but_for_the_edit() -> None:
    predicted = after(FILE, FILE.replace("width", "w").replace("# in square metres", "# m2"))
    assert predicted.num_appeared + predicted.num_others == len(FILE)
    assert 2 * len("idth") + len("in square metres") - 2 <= predicted.num_others <= 30


@given(prediction=texts, output=texts, cuts=st.lists(st.integers(0, 40), max_size=5))
def test_the_place_does_not_depend_on_how_many_tokens_come_at_once(
    prediction: list[int], output: list[int], cuts: list[int]
) -> None:
    whole, pieces = PredictedText(prediction), PredictedText(prediction)
    whole.follow(output)
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(output)], strict=True):
        pieces.follow(output[start:end])
    assert whole.next_tokens(9) == pieces.next_tokens(9)
    assert (whole.num_appeared, whole.num_in_row) == (pieces.num_appeared, pieces.num_in_row)


@given(prediction=texts, output=texts)
def test_what_counts_as_appeared_stands_in_the_output(prediction: list[int], output: list[int]) -> None:
    predicted = PredictedText(prediction)
    predicted.follow(output)
    assert predicted.num_appeared + predicted.num_others == len(prediction)
    assert predicted.num_appeared <= len(prediction)
    appeared = [token for token, has in zip(prediction, predicted._has_appeared, strict=True) if has]
    assert set(appeared) <= set(output)


@given(seed=st.integers(0, 1000), num_edits=st.integers(0, 4))
def test_few_edits_leave_most_of_a_text_predicted(seed: int, num_edits: int) -> None:
    rng = random.Random(seed)
    answer = [rng.randrange(10_000) for _ in range(400)]
    prediction = list(answer)
    for at in rng.sample(range(400), num_edits):
        prediction[at : at + rng.randrange(3)] = [20_000 + at] * rng.randrange(3)
    predicted, num_right = PredictedText(prediction), 0
    for token_id in answer:
        num_right += predicted.next_tokens(1) == [token_id]
        predicted.follow([token_id])
    assert num_right >= 400 - 4 * num_edits


def test_a_place_is_looked_for_within_reach_only() -> None:
    far = [7] * 9000 + [1, 2, 3, 4]
    predicted = PredictedText(far)
    predicted.follow([0, 1, 2, 3])
    assert predicted.next_tokens(1) == []
