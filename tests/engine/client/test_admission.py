"""Who is let in, and how long one more would wait for a slot and for its prompt to be computed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.client.admissions import Room


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
        assert room.stats.num_in_flight == inside


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
        assert (room.stats.num_in_flight, room.stats.num_waiting_tokens) == (0, 0)


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

    def test_what_an_engine_held_up_that_died_is_forgotten(self) -> None:
        room = Room(num_slots=1, max_queue_s=20)
        room.fill(2)
        room.serve(16, seconds_each=2.0)
        room.clock.now_s += 160
        assert "would wait about 24.0 s" in str(room.refused())
        room.forget_stall()
        assert room.predicted_wait_s == pytest.approx(2 * 2.0)
        room.fill(1)

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

    def test_what_an_engine_held_up_that_died_is_forgotten(self) -> None:
        room = self.busy_room()
        room.clock.now_s += 1000
        assert room.predicted_wait_s == pytest.approx(1000 * 1020 / 1000)
        room.forget_stall()
        assert room.predicted_wait_s == pytest.approx(1000 / 50)
