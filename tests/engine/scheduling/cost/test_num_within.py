"""What a limit allows is what a bisection finds, of any rising price, and is found sooner where that is linear."""

from bisect import bisect_right
from itertools import accumulate
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.cost.num_within import num_within

RISES = st.lists(st.sampled_from([0.0, 1e-9, 1.0, 1.5, 1e9, inf]), min_size=18, max_size=60)


@given(rises=RISES, limit=st.sampled_from([-1.0, 0.0, 0.5, 3.0, 20.0, 1e9, 1e300, inf]), share=st.floats(0.0, 1.0))
def test_it_finds_what_a_bisection_finds(rises: list[float], limit: float, share: float) -> None:
    prices = list(accumulate(rises))
    most = int(share * (len(prices) - 1))
    plain = bisect_right(range(1, most + 1), limit, key=prices.__getitem__)
    assert num_within(limit, most, prices.__getitem__) == plain


@given(
    fixed=st.floats(0.0, 1e-2),
    each=st.floats(1e-12, 1e-2),
    curved=st.floats(0.0, 1e-9),
    limit=st.floats(0.0, 10.0),
    trusted=st.integers(0, 5000),
    most=st.integers(0, 4096),
)
def test_it_finds_what_a_bisection_finds_of_the_price_of_steps(
    fixed: float, each: float, curved: float, limit: float, trusted: int, most: int
) -> None:
    def price(number: int) -> float:
        return inf if number > trusted else fixed + each * number + curved * (number * number)

    assert num_within(limit, most, price) == bisect_right(range(1, most + 1), limit, key=price)


def test_a_linear_price_is_asked_for_few_numbers() -> None:
    asked: list[int] = []

    def price(number: int) -> float:
        asked.append(number)
        return inf if number > 2000 else 1e-2 + 4e-5 * number

    assert (num_within(0.05, 4096, price), len(asked)) == (1000, 5)
