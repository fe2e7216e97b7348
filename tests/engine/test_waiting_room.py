"""When there is room, and when those without should come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import OverloadedError
from engine.waiting_room import WaitingRoom


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def full_room(clock: Clock, num_places: int = 10) -> WaitingRoom:
    room = WaitingRoom(num_places, clock)
    for _ in range(num_places):
        room.enter()
    return room


def retry_after(room: WaitingRoom) -> float:
    with pytest.raises(OverloadedError) as refused:
        room.enter()
    return refused.value.retry_after_s


def serve(room: WaitingRoom, clock: Clock, times: int, seconds_each: float) -> None:
    for _ in range(times):
        clock.now_s += seconds_each
        room.leave()
        room.enter()


@given(st.lists(st.booleans()), st.integers(1, 4))
def test_there_are_never_more_inside_than_places(enters: list[bool], num_places: int) -> None:
    room, inside = WaitingRoom(num_places), 0
    for enter in enters:
        if enter and inside == num_places:
            assert retry_after(room) >= 1
        elif enter:
            room.enter()
            inside += 1
        elif inside:
            room.leave()
            inside -= 1
        assert room.num_inside == inside


@pytest.mark.parametrize("times", [10, 200])
def test_the_wait_follows_the_rate_at_which_places_become_free(times: int) -> None:
    clock = Clock()
    room = full_room(clock)
    serve(room, clock, times, seconds_each=4.0)
    assert retry_after(room) == pytest.approx(4.0)


def test_those_refused_one_after_the_other_come_back_one_after_the_other() -> None:
    clock = Clock()
    room = full_room(clock)
    serve(room, clock, 10, seconds_each=2.0)
    assert [retry_after(room) for _ in range(3)] == pytest.approx([2.0, 4.0, 6.0])
    serve(room, clock, 1, seconds_each=2.0)
    assert retry_after(room) == pytest.approx(2.0)


def test_the_wait_is_between_one_second_and_one_minute() -> None:
    clock = Clock()
    room = full_room(clock)
    assert retry_after(room) == 1
    serve(room, clock, 10, seconds_each=0.001)
    assert retry_after(room) == 1
    serve(room, clock, 100, seconds_each=1000.0)
    assert retry_after(room) == 60


def test_a_room_that_hangs_makes_the_wait_longer() -> None:
    clock = Clock()
    room = full_room(clock)
    serve(room, clock, 1, seconds_each=2.0)
    clock.now_s += 10
    assert retry_after(room) == pytest.approx(12.0)


def test_what_was_measured_before_an_idle_time_is_forgotten() -> None:
    clock = Clock()
    room = full_room(clock, 2)
    serve(room, clock, 5, seconds_each=30.0)
    for act in (room.leave, room.leave, room.enter, room.enter):
        clock.now_s += 3600 if room.num_inside == 0 else 0
        act()
    assert retry_after(room) == 1
    serve(room, clock, 1, seconds_each=20.0)
    assert retry_after(room) == pytest.approx(20.0)
