"""Parameters of tests of which a few are quick, and the others slow."""

from collections.abc import Collection
from itertools import product
from typing import Any

import pytest


def crossed(first: Collection[Any], *others: Collection[Any], num_quick: int | None = None) -> list[Any]:
    """Returns all combinations as parameters of tests.

    The k-th of the `first` values is quick with the k-th combination of the others, which begin anew when they end. All
    that is left is slow: values that are each shown by a quick one, with other partners. So is all with values behind
    the first `num_quick`, which are all unless told.
    """
    combinations, num_quick = [*product(*others)], len(first) if num_quick is None else num_quick
    assert len(combinations) <= num_quick, "each combination of the others is quick with one of the first"

    def is_quick(k: int, place: int) -> bool:
        return k < num_quick and (k - place) % len(combinations) == 0

    return [
        pytest.param(value, *values, marks=() if is_quick(k, place) else pytest.mark.slow)
        for (k, value), (place, values) in product(enumerate(first), enumerate(combinations))
    ]


def slow_but(names: Collection[str], *quick: str) -> list[Any]:
    """Returns all names as parameters of tests, of which those that are not `quick` are slow: they differ from these
    by nothing that the test is about."""
    assert {*quick} <= {*names}
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in sorted(names)]
