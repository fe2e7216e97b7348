"""Who is refused at the door of the waiting room, what it is told, and when it should come back."""

from dataclasses import replace

import pytest

from engine.client.interface import Tenant
from engine.core.errors import OverloadedError
from tests.engine.async_engines import request
from tests.engine.client.admissions import Room


def full_room(num_slots: int = 4, max_waiting: int = 6) -> Room:
    room = Room(num_slots, max_waiting=max_waiting)
    room.fill(num_slots + max_waiting)
    return room


class TestRefusal:
    # Three ends, 2 s each, and three times the deviation of three: 6 + 2 * 3 * 3 ** 0.5 = 16.39 s.
    @pytest.mark.parametrize(("limit_s", "own_s"), [(16.3, None), (1e6, 16.3), (16.3, 100.0)])
    def test_who_would_wait_too_long_is_refused_at_once(self, limit_s: float, own_s: float | None) -> None:
        room = Room(num_slots=4, max_queue_s=limit_s)
        room.fill(4)
        room.serve(50, seconds_each=2.0)
        room.fill(2)
        assert room.predicted_wait_s == pytest.approx(6.0)
        assert "would wait about 6.0 s, perhaps 16.4 s, and must not wait over 16.3 s" in str(
            room.refused(max_queue_s=own_s)
        )

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

    def test_a_sibling_is_refused_for_want_of_places_and_tokens_only(self) -> None:
        sibling = replace(request(), is_sibling=True)  # of three tokens
        room = Room(num_slots=4, max_waiting=4, max_waiting_tokens=10, max_queue_s=1.0)
        room.fill(4)
        room.serve(50, seconds_each=2.0)
        assert "would wait" in str(room.refused())
        room.places += [room.admit(sibling), room.let_in(sibling)]
        with pytest.raises(OverloadedError, match="prompt tokens are waiting"):
            room.admit(sibling)
        for place in room.places:
            place.begin()
        room.places += [room.admit(sibling), room.let_in(sibling)]
        with pytest.raises(OverloadedError, match="All 8 places"):
            room.admit(sibling)

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

    # n ends may be ahead of it while 2 * (n + 3 * n ** 0.5) s are within the limit: none, one, two.
    @pytest.mark.parametrize(("limit_s", "told_s"), [(7.9, 6.0), (8.1, 4.0), (16.3, 2.0)])
    def test_the_ends_that_are_too_many_are_waited_for_outside(self, limit_s: float, told_s: float) -> None:
        room = Room(num_slots=4, max_queue_s=1e6)
        room.fill(6)
        room.serve(50, seconds_each=2.0)
        assert room.refused(max_queue_s=limit_s).retry_after_s == pytest.approx(told_s)
        for _ in range(round(told_s / 2)):
            room.refused(max_queue_s=limit_s)
            room.end(after_s=2.0)
        room.check(limit_s)

    def test_the_prompts_that_are_too_many_are_waited_for_outside(self) -> None:
        room = Room(num_slots=100, batch_tokens=100)
        room.fill(20, 100)
        room.begin(10, seconds_each=2.0)
        assert room.refused(max_queue_s=10.0).retry_after_s == pytest.approx(20.0 - 10.0 / 1.25)

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
