"""Which requests are admitted, and how long one more would wait for a slot and for its prompt to be computed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.client.admissions import ClockedAdmission


@given(st.lists(st.booleans()), st.integers(1, 3), st.integers(1, 3))
def test_there_are_never_more_inside_than_slots_and_waiting_places(
    enters: list[bool], num_slots: int, max_waiting: int
) -> None:
    admission, inside = ClockedAdmission(num_slots, max_waiting=max_waiting), 0
    for enter in enters:
        if enter and inside == num_slots + max_waiting:
            assert admission.retry_after_s() >= 1
        elif enter:
            admission.fill(1)
            inside += 1
        elif inside:
            admission.end()
            inside -= 1
        assert admission.stats.num_in_flight == inside


class TestPromptTokens:
    def test_they_are_bounded_until_they_are_computed(self) -> None:
        admission = ClockedAdmission(max_waiting_tokens=100)
        admission.fill(1, 60)
        admission.fill(1, 40)
        assert "100 prompt tokens are waiting" in str(admission.refused())
        admission.places[0].begin()
        assert admission.stats.num_waiting_tokens == 40
        admission.fill(1, 60)

    def test_a_request_that_waits_alone_may_have_more(self) -> None:
        admission = ClockedAdmission(max_waiting_tokens=100)
        admission.fill(1, 5000)
        assert admission.stats.num_waiting_tokens == 5000
        assert admission.refused().retry_after_s == 1

    @given(st.lists(st.tuples(st.integers(1, 50), st.booleans())))
    def test_they_are_forgotten_once_however_the_request_goes_on(self, requests: list[tuple[int, bool]]) -> None:
        admission = ClockedAdmission(num_slots=1000)
        for num_tokens, begins in requests:
            admission.fill(1, num_tokens)
            if begins:
                admission.places[-1].begin()
                admission.places[-1].begin()
        waiting = sum(num_tokens for num_tokens, begins in requests if not begins)
        assert admission.stats.num_waiting_tokens == waiting
        while admission.places:
            admission.end()
        assert (admission.stats.num_in_flight, admission.stats.num_waiting_tokens) == (0, 0)


class TestWaitForSlot:
    def test_it_follows_the_rate_of_ends_and_the_place_in_the_queue(self) -> None:
        admission = ClockedAdmission(num_slots=4)
        admission.fill(6)
        admission.serve(50, seconds_each=2.0)
        assert admission.predicted_wait_s == pytest.approx(3 * 2.0)
        admission.fill(2)
        assert admission.predicted_wait_s == pytest.approx(5 * 2.0)

    def test_a_free_slot_means_no_wait(self) -> None:
        admission = ClockedAdmission(num_slots=4)
        admission.fill(4)
        admission.serve(50, seconds_each=2.0)
        assert admission.predicted_wait_s > 0
        admission.end()
        assert admission.predicted_wait_s == 0

    def test_before_the_first_ends_those_that_run_are_taken_to_end_just_now(self) -> None:
        admission = ClockedAdmission(num_slots=4)
        admission.fill(7)
        assert admission.predicted_wait_s == 0
        admission.clock.now_s += 8
        assert admission.predicted_wait_s == pytest.approx(4 * 8.0 / 4)

    def test_a_stall_makes_it_longer(self) -> None:
        admission = ClockedAdmission(num_slots=1)
        admission.fill(2)
        admission.serve(16, seconds_each=2.0)
        admission.clock.now_s += 160
        assert admission.predicted_wait_s == pytest.approx(2 * (32 + 160) / 16)

    def test_what_an_engine_held_up_that_died_is_forgotten(self) -> None:
        admission = ClockedAdmission(num_slots=1, max_queue_s=20)
        admission.fill(2)
        admission.serve(16, seconds_each=2.0)
        admission.clock.now_s += 160
        assert "would wait about 24.0 s" in str(admission.refused())
        admission.forget_stall()
        assert admission.predicted_wait_s == pytest.approx(2 * 2.0)
        admission.fill(1)

    def test_only_time_in_which_all_slots_were_taken_is_measured(self) -> None:
        admission = ClockedAdmission(num_slots=2)
        admission.fill(3)
        admission.serve(20, seconds_each=2.0)
        while admission.places:
            admission.end()
        for _ in range(50):
            admission.fill(1)
            admission.end(after_s=100)
        admission.fill(2)
        assert admission.predicted_wait_s == pytest.approx(2.0, rel=0.3)

    def test_the_newest_ends_count(self) -> None:
        admission = ClockedAdmission(num_slots=1)
        admission.fill(2)
        admission.serve(100, seconds_each=50.0)
        admission.serve(16, seconds_each=1.0)
        assert admission.predicted_wait_s == pytest.approx(2.0)


class TestWaitForPrefill:
    def busy_admission(self) -> ClockedAdmission:
        """Returns one in which 10 prompts of 100 tokens wait, and 50 tokens are computed a second."""
        admission = ClockedAdmission(num_slots=100, batch_tokens=100)
        admission.fill(20, 100)
        admission.begin(10, seconds_each=2.0)
        return admission

    def test_it_follows_the_rate_of_prefill_and_the_tokens_ahead(self) -> None:
        assert self.busy_admission().predicted_wait_s == pytest.approx(1000 / 50)

    def test_less_than_a_batch_need_not_wait(self) -> None:
        admission = self.busy_admission()
        for place in admission.places[10:19]:
            place.begin()
        assert admission.stats.num_waiting_tokens == 100 and admission.predicted_wait_s == 0

    def test_small_prompts_one_by_one_are_not_measured(self) -> None:
        admission = ClockedAdmission(num_slots=100, batch_tokens=100)
        for _ in range(100):
            admission.fill(1, 5)
            admission.clock.now_s += 1
            admission.places[-1].begin()
            admission.end()
        admission.fill(50, 100)
        assert admission.predicted_wait_s == 0

    def test_prompts_held_up_by_full_slots_are_not_measured(self) -> None:
        admission = self.busy_admission()
        admission.fill(80, 1)
        admission.clock.now_s += 1000
        admission.places[-1].begin()
        admission.end()
        assert admission.predicted_wait_s == pytest.approx(1079 / 50)

    def test_what_an_engine_held_up_that_died_is_forgotten(self) -> None:
        admission = self.busy_admission()
        admission.clock.now_s += 1000
        assert admission.predicted_wait_s == pytest.approx(1000 * 1020 / 1000)
        admission.forget_stall()
        assert admission.predicted_wait_s == pytest.approx(1000 / 50)
