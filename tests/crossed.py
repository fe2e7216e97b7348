"""Every combination of some values as parameters of tests, of which a few are quick."""

from collections.abc import Collection
from itertools import product
from typing import Any

import pytest


def crossed(first: Collection[Any], *others: Collection[Any]) -> list[Any]:
    """Returns all combinations as parameters of tests.

    The k-th of the `first` values is quick with the k-th combination of the others, which begin anew when they end. All
    that is left is slow: values that are each shown by a quick one, with other partners.
    """
    combinations = [*product(*others)]
    assert len(combinations) <= len(first), "each combination of the others is quick with one of the first"
    return [
        pytest.param(value, *values, marks=() if (k - place) % len(combinations) == 0 else pytest.mark.slow)
        for (k, value), (place, values) in product(enumerate(first), enumerate(combinations))
    ]
