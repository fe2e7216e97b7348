"""Finds how much a limit allows of what has a rising price; torch-free."""

from bisect import bisect_right
from collections.abc import Callable
from math import inf

_FEW = 16


def num_within(limit: float, most: int, price: Callable[[int], float]) -> int:
    """Returns how many of `most` have a price within the limit, which may be none; the price never falls as they become
    more. A price that is about linear is asked for a few numbers, not for all that bisection takes."""
    if price(most) <= limit:
        return most
    fitting, excessive = 0, most
    guess = _guess(limit, most, price(0), price(_FEW))
    for number in (guess, guess + 1, guess - 1):
        if fitting < number < excessive:
            if price(number) <= limit:
                fitting = number
            else:
                excessive = number
    return fitting + bisect_right(range(fitting + 1, excessive), limit, key=price)


def _guess(limit: float, most: int, of_none: float, of_few: float) -> int:
    """Returns how many there would be if the price were linear."""
    if not of_none < of_few < inf:
        return 0
    return int(min(max(_FEW * (limit - of_none) / (of_few - of_none), 0.0), most))
