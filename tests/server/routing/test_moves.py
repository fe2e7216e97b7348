"""A request moves on while there is hope: it waits for a replica a bounded time, and is not handed to ever more of them
to die of it. Time is virtual."""

import asyncio
from collections.abc import Callable

from server.routing.moves import MAX_MOVES, Moves, NoReplicaError, ReplicaLostError


class Time:
    """A clock that only sleep moves on."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)
        self.now_s += pause_s


def attempts(attempt: Callable[[Moves, int], ReplicaLostError | None], wait_s: float = 60.0) -> tuple[int, Time, Moves]:
    """Returns how many attempts it took until one succeeded, or none was left."""
    time = Time()
    moves = Moves(wait_s, time.clock, time.sleep)

    async def run() -> int:
        number = 0
        while await moves.may_try():
            if (error := attempt(moves, number)) is None:
                return number + 1
            moves.fail(error)
            number += 1
        return number

    return asyncio.run(run()), time, moves


def dies(moves: Moves, number: int) -> ReplicaLostError:
    moves.take(f"replica-{number}")
    return ReplicaLostError()


def test_it_waits_until_a_replica_is_there_however_often_none_is() -> None:
    num, time, moves = attempts(lambda moves, number: NoReplicaError() if moves.left_s > 30 else None)
    assert num > MAX_MOVES + 1 and 30 <= time.now_s < 32 and moves.excluded == []


def test_it_waits_a_bounded_time_with_pauses_that_grow() -> None:
    num, time, moves = attempts(lambda *_: NoReplicaError(), wait_s=6000.0)
    assert 6000 <= time.now_s <= 6001 and num < 6010, "without a busy loop"
    assert time.pauses_s[:5] == [0.1, 0.2, 0.4, 0.8, 1.0] and moves.left_s <= 0


def test_what_replicas_die_of_is_given_up() -> None:
    num, _, moves = attempts(dies)
    assert num == MAX_MOVES + 1
    assert moves.excluded == [f"replica-{number}" for number in range(num)]


def test_the_first_other_replica_is_asked_at_once() -> None:
    num, time, _ = attempts(lambda moves, number: dies(moves, number) if number == 0 else None)
    assert (num, time.pauses_s) == (2, [])


def test_tokens_in_between_are_a_new_beginning() -> None:
    def attempt(moves: Moves, number: int) -> ReplicaLostError | None:
        moves.progress()
        return dies(moves, number) if number < 20 else None

    num, time, _ = attempts(attempt)
    assert (num, time.pauses_s) == (21, [])


def test_a_replica_that_had_it_for_long_leaves_the_whole_wait_for_the_next() -> None:
    def attempt(moves: Moves, number: int) -> ReplicaLostError | None:
        time.now_s += 50
        return dies(moves, number)

    time = Time()
    moves = Moves(60.0, time.clock, time.sleep)
    moves.fail(attempt(moves, 0) or ReplicaLostError())
    assert moves.left_s == 60


def test_a_replica_that_refused_it_is_excluded_and_one_that_nobody_named_is_not() -> None:
    _, _, moves = attempts(lambda moves, number: moves.take("full") or NoReplicaError() if number == 0 else None)
    assert moves.excluded == ["full"]
