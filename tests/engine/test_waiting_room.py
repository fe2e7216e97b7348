"""Who is let in, how long one more would wait, and when those refused should come back."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.client import Tenant
from engine.errors import OverloadedError
from engine.waiting_room import Place, RoomLimits, WaitingRoom


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Room(WaitingRoom):
    """With a clock of its own, and all places in the order they were taken."""

    def __init__(self, num_slots: int = 4, batch_tokens: int = 100, **limits: Any) -> None:
        self.clock = Clock()
        super().__init__(RoomLimits(**{"max_queue_s": 1e6, **limits}), num_slots, batch_tokens, self.clock)
        self.places: list[Place] = []

    def fill(self, num_requests: int, num_tokens: int = 1) -> None:
        self.places += [self.enter(num_tokens) for _ in range(num_requests)]

    def end(self, after_s: float = 0.0) -> None:
        """The oldest ends."""
        self.clock.now_s += after_s
        self.places.pop(0).leave()

    def begin(self, num_requests: int, seconds_each: float) -> None:
        """The oldest ones have their prompts computed, one after the other."""
        for place in self.places[:num_requests]:
            self.clock.now_s += seconds_each
            place.begin()

    def serve(self, times: int, seconds_each: float) -> None:
        """One ends, and another comes in its place."""
        for _ in range(times):
            self.end(seconds_each)
            self.fill(1)

    def refused(self, num_tokens: int = 1, max_queue_s: float | None = None) -> OverloadedError:
        with pytest.raises(OverloadedError) as refused:
            self.enter(num_tokens, max_queue_s)
        return refused.value

    def retry_after_s(self) -> float:
        return self.refused().retry_after_s


def full_room(num_slots: int = 4, max_waiting: int = 6) -> Room:
    room = Room(num_slots, max_waiting=max_waiting)
    room.fill(num_slots + max_waiting)
    return room


@given(st.lists(st.booleans()), st.integers(1, 3), st.integers(1, 3))
def test_there_are_never_more_inside_than_slots_and_waiting_places(
    enters: list[bool], num_slots: int, max_waiting: int
) -> None:
    room, inside = Room(num_slots, max_waiting=max_waiting), 0
    for enter in enters:
        if enter and inside == num_slots + max_waiting:
            assert room.retry_after_s() >= 1
        elif enter:
            room.fill(1)
            inside += 1
        elif inside:
            room.end()
            inside -= 1
        assert room.stats.num_inside == inside


class TestPromptTokens:
    def test_they_are_bounded_until_they_are_computed(self) -> None:
        room = Room(max_waiting_tokens=100)
        room.fill(1, 60)
        room.fill(1, 40)
        assert "100 prompt tokens are waiting" in str(room.refused())
        room.places[0].begin()
        assert room.stats.num_waiting_tokens == 40
        room.fill(1, 60)

    def test_who_is_alone_may_bring_more(self) -> None:
        room = Room(max_waiting_tokens=100)
        room.fill(1, 5000)
        assert room.stats.num_waiting_tokens == 5000
        assert room.refused().retry_after_s == 1

    @given(st.lists(st.tuples(st.integers(1, 50), st.booleans())))
    def test_they_are_forgotten_once_however_the_request_goes_on(self, requests: list[tuple[int, bool]]) -> None:
        room = Room(num_slots=1000)
        for num_tokens, begins in requests:
            room.fill(1, num_tokens)
            if begins:
                room.places[-1].begin()
                room.places[-1].begin()
        waiting = sum(num_tokens for num_tokens, begins in requests if not begins)
        assert room.stats.num_waiting_tokens == waiting
        while room.places:
            room.end()
        assert (room.stats.num_inside, room.stats.num_waiting_tokens) == (0, 0)


class TestWaitForSlot:
    def test_it_follows_the_rate_of_ends_and_the_place_in_the_queue(self) -> None:
        room = Room(num_slots=4)
        room.fill(6)
        room.serve(50, seconds_each=2.0)
        assert room.predicted_wait_s == pytest.approx(3 * 2.0)
        room.fill(2)
        assert room.predicted_wait_s == pytest.approx(5 * 2.0)

    def test_a_free_slot_means_no_wait(self) -> None:
        room = Room(num_slots=4)
        room.fill(4)
        room.serve(50, seconds_each=2.0)
        assert room.predicted_wait_s > 0
        room.end()
        assert room.predicted_wait_s == 0

    def test_before_the_first_ends_those_that_run_are_taken_to_end_just_now(self) -> None:
        room = Room(num_slots=4)
        room.fill(7)
        assert room.predicted_wait_s == 0
        room.clock.now_s += 8
        assert room.predicted_wait_s == pytest.approx(4 * 8.0 / 4)

    def test_a_room_that_hangs_makes_it_longer(self) -> None:
        room = Room(num_slots=1)
        room.fill(2)
        room.serve(16, seconds_each=2.0)
        room.clock.now_s += 160
        assert room.predicted_wait_s == pytest.approx(2 * (32 + 160) / 16)

    def test_only_time_in_which_all_slots_were_taken_is_measured(self) -> None:
        room = Room(num_slots=2)
        room.fill(3)
        room.serve(20, seconds_each=2.0)
        while room.places:
            room.end()
        for _ in range(50):
            room.fill(1)
            room.end(after_s=100)
        room.fill(2)
        assert room.predicted_wait_s == pytest.approx(2.0, rel=0.3)

    def test_the_newest_ends_count(self) -> None:
        room = Room(num_slots=1)
        room.fill(2)
        room.serve(100, seconds_each=50.0)
        room.serve(16, seconds_each=1.0)
        assert room.predicted_wait_s == pytest.approx(2.0)


class TestWaitForPrefill:
    def busy_room(self) -> Room:
        """50 tokens a second."""
        room = Room(num_slots=100, batch_tokens=100)
        room.fill(20, 100)
        room.begin(10, seconds_each=2.0)
        return room

    def test_it_follows_the_rate_of_prefill_and_the_tokens_ahead(self) -> None:
        assert self.busy_room().predicted_wait_s == pytest.approx(1000 / 50)

    def test_less_than_a_batch_need_not_wait(self) -> None:
        room = self.busy_room()
        for place in room.places[10:19]:
            place.begin()
        assert room.stats.num_waiting_tokens == 100 and room.predicted_wait_s == 0

    def test_small_prompts_one_by_one_say_nothing_about_the_rate(self) -> None:
        room = Room(num_slots=100, batch_tokens=100)
        for _ in range(100):
            room.fill(1, 5)
            room.clock.now_s += 1
            room.places[-1].begin()
            room.end()
        room.fill(50, 100)
        assert room.predicted_wait_s == 0

    def test_prompts_held_up_by_full_slots_say_nothing_about_the_rate(self) -> None:
        room = self.busy_room()
        room.fill(80, 1)
        room.clock.now_s += 1000
        room.places[-1].begin()
        room.end()
        assert room.predicted_wait_s == pytest.approx(1079 / 50)


class TestRefusal:
    # Three ends, 2 s each, and three times the deviation of three: 6 + 2 * 3 * 3 ** 0.5 = 16.39 s.
    @pytest.mark.parametrize(("limit_s", "own_s"), [(16.3, None), (1e6, 16.3), (16.3, 100.0)])
    def test_who_would_wait_too_long_is_refused_at_once(self, limit_s: float, own_s: float | None) -> None:
        room = Room(num_slots=4, max_queue_s=limit_s)
        room.fill(4)
        room.serve(50, seconds_each=2.0)
        room.fill(2)
        assert room.predicted_wait_s == pytest.approx(6.0)
        assert "would wait about 6.0 s, and must not wait over 16.3 s" in str(room.refused(max_queue_s=own_s))

    @pytest.mark.parametrize("own_s", [None, 16.5, 100.0])
    def test_who_would_not_is_let_in(self, own_s: float | None) -> None:
        room = Room(num_slots=4, max_queue_s=16.5)
        room.fill(4)
        room.serve(50, seconds_each=2.0)
        room.fill(2)
        room.check(own_s)
        room.enter(1, own_s)

    def test_it_is_known_at_the_door_what_any_request_would_be_told(self) -> None:
        room = full_room()
        with pytest.raises(OverloadedError, match="All 10 places are taken"):
            room.check()
        room.end()
        room.check()

    @pytest.mark.parametrize(("limit_s", "is_let_in"), [(24.9, False), (25.1, True)])
    def test_prefill_may_take_a_quarter_longer(self, limit_s: float, is_let_in: bool) -> None:
        room = Room(num_slots=100, batch_tokens=100)
        room.fill(20, 100)
        room.begin(10, seconds_each=2.0)
        assert room.predicted_wait_s == pytest.approx(20.0)
        if is_let_in:
            room.enter(1, limit_s)
        else:
            room.refused(max_queue_s=limit_s)

    def test_a_free_slot_is_given_to_the_least_patient(self) -> None:
        room = Room(num_slots=4)
        room.fill(4)
        room.serve(50, seconds_each=2.0)
        room.end()
        room.enter(1, 0.001)

    def test_it_stands_until_one_ends(self) -> None:
        room = Room(num_slots=4, max_queue_s=16.3)
        room.fill(4)
        room.serve(50, seconds_each=2.0)
        room.fill(2)
        told = str(room.refused())
        room.clock.now_s += 1.0
        assert [str(room.refused(max_queue_s=own_s)) for own_s in (None, 1e6)] == [told, told]
        room.clock.now_s -= 1.0
        room.end()
        room.check()

    def test_it_stands_until_a_prompt_is_computed(self) -> None:
        room = Room(num_slots=100, batch_tokens=100, max_queue_s=24.9)
        room.fill(20, 100)
        room.begin(10, seconds_each=2.0)
        room.refused()
        room.places[10].begin()
        room.check()

    def test_it_is_one_tenants_own(self) -> None:
        room = Room(num_slots=1, max_queue_s=21.0)
        room.fill(2)
        room.serve(20, seconds_each=2.0)
        with pytest.raises(OverloadedError):
            for _ in range(10):
                room.enter(1, tenant=Tenant("many", 0.5))
        room.check(tenant=Tenant("few", 0.5))

    @pytest.mark.parametrize("times", [10, 200])
    def test_retry_after_follows_the_rate_of_ends(self, times: int) -> None:
        room = full_room()
        room.serve(times, seconds_each=4.0)
        assert room.retry_after_s() == pytest.approx(4.0)

    def test_those_refused_one_after_the_other_come_back_one_after_the_other(self) -> None:
        room = full_room()
        room.serve(10, seconds_each=2.0)
        assert [room.retry_after_s() for _ in range(3)] == pytest.approx([2.0, 4.0, 6.0])
        room.serve(1, seconds_each=2.0)
        assert room.retry_after_s() == pytest.approx(2.0)

    def test_the_part_of_the_wait_that_is_too_long_is_waited_outside(self) -> None:
        room = Room(num_slots=4, max_queue_s=1e6)
        room.fill(6)
        room.serve(50, seconds_each=2.0)
        assert room.refused(max_queue_s=1.0).retry_after_s == pytest.approx(16.392 - 1.0 + 2.0, abs=0.001)

    def test_tokens_that_are_too_many_are_waited_for(self) -> None:
        room = Room(num_slots=100, batch_tokens=100, max_waiting_tokens=2000)
        room.fill(20, 100)
        room.begin(10, seconds_each=2.0)
        assert room.refused(1100).retry_after_s == pytest.approx(100 / 50)

    def test_it_is_between_one_second_and_one_minute(self) -> None:
        room = full_room()
        assert room.retry_after_s() == 1
        room.serve(10, seconds_each=0.001)
        assert room.retry_after_s() == 1
        room.serve(100, seconds_each=1000.0)
        assert room.retry_after_s() == 60
