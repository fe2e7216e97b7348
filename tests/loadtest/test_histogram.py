import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.histogram import bar, bins, histogram_lines


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_every_value_is_in_exactly_one_bin(values: list[float]) -> None:
    counted = bins(values)
    assert sum(count for _, _, count in counted) == len(values)
    assert all(start <= end for start, end, _ in counted)


def test_bins_widen_by_a_constant_factor() -> None:
    counted = bins([1.0, 5.0, 50.0, 500.0, 1000.0], num_bins=3)
    assert [count for _, _, count in counted] == [2, 1, 2]
    assert [start for start, _, _ in counted] == pytest.approx([1, 10, 100])


def test_the_fullest_bin_has_the_longest_bar_and_no_full_bin_has_none() -> None:
    lines = histogram_lines([1.0] * 900 + [1000.0], width=20)
    assert lines[0].count("█") == 20
    assert "▏" in lines[-1]
    assert histogram_lines([]) == []


@pytest.mark.parametrize(("fraction", "expected"), [(0, ""), (0.5, "██"), (1, "████"), (0.28, "█▏"), (1e-9, "▏")])
def test_a_bar_fills_its_share_of_the_width(fraction: float, expected: str) -> None:
    assert bar(fraction, 4) == expected
