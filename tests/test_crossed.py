"""Combinations of which a few are quick: none is lost, and the quick ones have every value."""

from itertools import product

from tests.crossed import crossed


def test_all_are_there_and_the_quick_ones_have_every_value() -> None:
    names, types, bits = "abcdefg", (32, 16), (8, 4, 0)
    cases = crossed(names, types, bits)
    assert [case.values for case in cases] == [*product(names, types, bits)]
    quick = [case.values for case in cases if not case.marks]
    assert [name for name, *_ in quick] == [*names]
    assert {case[1:] for case in quick} == {*product(types, bits)}


def test_values_behind_the_quick_ones_are_slow() -> None:
    names, bits = "abcde", (8, 4)
    cases = crossed(names, bits, num_quick=2)
    assert [case.values for case in cases] == [*product(names, bits)]
    assert [case.values for case in cases if not case.marks] == [("a", 8), ("b", 4)]
