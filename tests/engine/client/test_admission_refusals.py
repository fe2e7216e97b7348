"""Which requests admission control refuses, with what error, and when they should come back."""

import msgspec
import pytest

from engine.core.errors import OverloadedError
from engine.core.generation_request import Tenant
from tests.engine.async_engines import request
from tests.engine.client.admissions import ClockedAdmission


def full_admission(num_slots: int = 4, max_waiting: int = 6) -> ClockedAdmission:
    admission = ClockedAdmission(num_slots, max_waiting=max_waiting)
    admission.fill(num_slots + max_waiting)
    return admission


class TestRefusal:
    # Three ends, 2 s each, and three times the deviation of three: 6 + 2 * 3 * 3 ** 0.5 = 16.39 s.
    @pytest.mark.parametrize(("limit_s", "own_s"), [(16.3, None), (1e6, 16.3), (16.3, 100.0)])
    def test_a_request_that_would_wait_too_long_is_refused_at_once(self, limit_s: float, own_s: float | None) -> None:
        admission = ClockedAdmission(num_slots=4, max_queue_s=limit_s)
        admission.fill(4)
        admission.serve(50, seconds_each=2.0)
        admission.fill(2)
        assert admission.predicted_wait_s == pytest.approx(6.0)
        assert "would wait about 6.0 s, perhaps 16.4 s, and must not wait over 16.3 s" in str(
            admission.refused(max_queue_s=own_s)
        )

    @pytest.mark.parametrize("own_s", [None, 16.5, 100.0])
    def test_a_request_that_would_not_is_admitted(self, own_s: float | None) -> None:
        admission = ClockedAdmission(num_slots=4, max_queue_s=16.5)
        admission.fill(4)
        admission.serve(50, seconds_each=2.0)
        admission.fill(2)
        admission.check(own_s)
        admission.enter(1, own_s)

    def test_check_raises_what_any_request_would_get(self) -> None:
        admission = full_admission()
        with pytest.raises(OverloadedError, match="All 10 places are taken"):
            admission.check()
        admission.end()
        admission.check()

    @pytest.mark.parametrize(("limit_s", "is_admitted"), [(24.9, False), (25.1, True)])
    def test_prefill_may_take_a_quarter_longer(self, limit_s: float, is_admitted: bool) -> None:
        admission = ClockedAdmission(num_slots=100, batch_tokens=100)
        admission.fill(20, 100)
        admission.begin(10, seconds_each=2.0)
        assert admission.predicted_wait_s == pytest.approx(20.0)
        if is_admitted:
            admission.enter(1, limit_s)
        else:
            admission.refused(max_queue_s=limit_s)

    def test_a_free_slot_is_given_to_the_least_patient(self) -> None:
        admission = ClockedAdmission(num_slots=4)
        admission.fill(4)
        admission.serve(50, seconds_each=2.0)
        admission.end()
        admission.enter(1, 0.001)

    def test_it_stands_until_one_ends(self) -> None:
        admission = ClockedAdmission(num_slots=4, max_queue_s=16.3)
        admission.fill(4)
        admission.serve(50, seconds_each=2.0)
        admission.fill(2)
        refusal = str(admission.refused())
        admission.clock.now_s += 1.0
        assert [str(admission.refused(max_queue_s=own_s)) for own_s in (None, 1e6)] == [refusal, refusal]
        admission.clock.now_s -= 1.0
        admission.end()
        admission.check()

    def test_it_stands_until_a_prompt_is_computed(self) -> None:
        admission = ClockedAdmission(num_slots=100, batch_tokens=100, max_queue_s=24.9)
        admission.fill(20, 100)
        admission.begin(10, seconds_each=2.0)
        admission.refused()
        admission.places[10].begin()
        admission.check()

    def test_a_sibling_is_refused_for_want_of_places_and_tokens_only(self) -> None:
        sibling = msgspec.structs.replace(request(), is_sibling=True)  # of three tokens
        admission = ClockedAdmission(num_slots=4, max_waiting=4, max_waiting_tokens=10, max_queue_s=1.0)
        admission.fill(4)
        admission.serve(50, seconds_each=2.0)
        assert "would wait" in str(admission.refused())
        admission.places += [admission.admit(sibling), admission.admit(sibling)]
        with pytest.raises(OverloadedError, match="prompt tokens are waiting"):
            admission.admit(sibling)
        for place in admission.places:
            place.begin()
        admission.places += [admission.admit(sibling), admission.admit(sibling)]
        with pytest.raises(OverloadedError, match="All 8 places"):
            admission.admit(sibling)

    def test_it_is_one_tenants_own(self) -> None:
        admission = ClockedAdmission(num_slots=1, max_queue_s=21.0)
        admission.fill(2)
        admission.serve(20, seconds_each=2.0)
        for _ in range(3):
            admission.enter(1, tenant=Tenant("many", 0.5))
        with pytest.raises(OverloadedError, match="must not wait over 21 s"):
            admission.enter(1, tenant=Tenant("many", 0.5))
        admission.check(tenant=Tenant("few", 0.5))

    def test_no_more_than_some_thousand_tenants_are_remembered(self) -> None:
        admission = ClockedAdmission(num_slots=1, max_queue_s=2.0)
        admission.fill(1)
        admission.serve(20, seconds_each=2.0)
        for number in range(20_000):
            with pytest.raises(OverloadedError, match="must not wait"):
                admission.check(tenant=Tenant(f"peer {number}", 0.001))
        assert max(len(admission._num_refused), len(admission._standing)) <= 4097

    @pytest.mark.parametrize("times", [10, 200])
    def test_retry_after_follows_the_rate_of_ends(self, times: int) -> None:
        admission = full_admission()
        admission.serve(times, seconds_each=4.0)
        assert admission.retry_after_s() == pytest.approx(4.0)

    def test_those_refused_one_after_the_other_come_back_one_after_the_other(self) -> None:
        admission = full_admission()
        admission.serve(10, seconds_each=2.0)
        assert [admission.retry_after_s() for _ in range(3)] == pytest.approx([2.0, 4.0, 6.0])
        admission.serve(1, seconds_each=2.0)
        assert admission.retry_after_s() == pytest.approx(2.0)

    # n ends may be ahead of it while 2 * (n + 3 * n ** 0.5) s are within the limit: none, one, two.
    @pytest.mark.parametrize(("limit_s", "told_s"), [(7.9, 6.0), (8.1, 4.0), (16.3, 2.0)])
    def test_the_ends_that_are_too_many_are_waited_for_outside(self, limit_s: float, told_s: float) -> None:
        admission = ClockedAdmission(num_slots=4, max_queue_s=1e6)
        admission.fill(6)
        admission.serve(50, seconds_each=2.0)
        assert admission.refused(max_queue_s=limit_s).retry_after_s == pytest.approx(told_s)
        for _ in range(round(told_s / 2)):
            admission.refused(max_queue_s=limit_s)
            admission.end(after_s=2.0)
        admission.check(limit_s)

    def test_the_prompts_that_are_too_many_are_waited_for_outside(self) -> None:
        admission = ClockedAdmission(num_slots=100, batch_tokens=100)
        admission.fill(20, 100)
        admission.begin(10, seconds_each=2.0)
        assert admission.refused(max_queue_s=10.0).retry_after_s == pytest.approx(20.0 - 10.0 / 1.25)

    def test_tokens_that_are_too_many_are_waited_for(self) -> None:
        admission = ClockedAdmission(num_slots=100, batch_tokens=100, max_waiting_tokens=2000)
        admission.fill(20, 100)
        admission.begin(10, seconds_each=2.0)
        assert admission.refused(1100).retry_after_s == pytest.approx(100 / 50)

    def test_it_is_between_one_second_and_one_minute(self) -> None:
        admission = full_admission()
        assert admission.retry_after_s() == 1
        admission.serve(10, seconds_each=0.001)
        assert admission.retry_after_s() == 1
        admission.serve(100, seconds_each=1000.0)
        assert admission.retry_after_s() == 60
