"""Requests that arrive together are started one in a turn of the event loop, callers by turns."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from server.limits.request_turns import RequestTurns


def never() -> str:
    raise AssertionError("nobody asks who the caller is")


async def started(requests: Iterable[tuple[str, Callable[[], None]]]) -> None:
    turns = RequestTurns()
    for caller, start in requests:
        turns.start(lambda name=caller: name, start)  # type: ignore[misc]


def order_of(*callers: str) -> list[str]:
    """Returns in which order requests of these callers start if they arrive in one turn of the loop."""
    begun: list[str] = []

    async def run() -> None:
        await started((caller, partial(begun.append, f"{caller}{number}")) for number, caller in enumerate(callers))
        while len(begun) < len(callers):
            await asyncio.sleep(0)

    asyncio.run(run())
    return begun


def test_a_request_that_comes_alone_starts_at_once_and_nobody_asks_whose_it_is() -> None:
    async def run() -> list[int]:
        turns, begun = RequestTurns(), list[int]()
        for number in range(3):
            turns.start(never, partial(begun.append, number))
            assert begun[-1] == number
            await asyncio.sleep(0)
        return begun

    assert asyncio.run(run()) == [0, 1, 2]


def test_those_of_one_caller_start_as_they_came() -> None:
    assert order_of("a", "a", "a", "a") == ["a0", "a1", "a2", "a3"]


def test_another_caller_does_not_wait_for_all_that_came_before() -> None:
    assert order_of("a", "a", "a", "a", "a", "b", "b") == ["a0", "a1", "b5", "a2", "b6", "a3", "a4"]


def test_one_is_started_in_each_turn_of_the_loop() -> None:
    async def run() -> list[int]:
        num_begun = 0

        def begin() -> None:
            nonlocal num_begun
            num_begun += 1

        await started([("a", begin)] * 5)
        counts = [num_begun]
        while num_begun < 5:
            await asyncio.sleep(0)
            counts.append(num_begun)
        return counts

    assert asyncio.run(run()) == [1, 2, 3, 4, 5]
