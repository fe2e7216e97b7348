"""Whatever one tenant asks for, the others are admitted up to their parts, and never more requests than the bounds."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.client.admission import AdmissionControl, AdmissionLimits, Place
from engine.client.tenant_quotas import TenantQuotas, max_tenant_places, max_tenant_tokens
from engine.core.errors import OverloadedError
from engine.core.generation_request import Tenant
from tests.clock import Clock

WEIGHTS = st.lists(st.integers(1, 5), min_size=1, max_size=5)
NUM_SLOTS = 3


class TenantAdmission(AdmissionControl):
    """Admission control with a clock of its own, and the places of each tenant in the order they were taken."""

    def __init__(self, weights: list[int], num_slots: int = NUM_SLOTS, **limits: Any) -> None:
        self.clock = Clock()
        super().__init__(AdmissionLimits(**{"max_queue_s": 1e6, **limits}), num_slots, 100, self.clock)
        self.tenants = [Tenant(f"key-{index}", weight / sum(weights)) for index, weight in enumerate(weights)]
        self.places: list[list[Place]] = [[] for _ in weights]

    def admits(self, number: int, num_tokens: int = 1, max_queue_s: float | None = None) -> bool:
        try:
            self.places[number].append(self.enter(num_tokens, max_queue_s, self.tenants[number]))
        except OverloadedError:
            return False
        return True

    def flood(self, number: int, num_tokens: int = 1) -> None:
        while self.admits(number, num_tokens):
            pass

    def end(self, number: int) -> None:
        if self.places[number]:
            self.places[number].pop(0).leave()


@st.composite
def busy_admissions(draw: st.DrawFn) -> TenantAdmission:
    """Draws one after requests of any tenants and sizes, begun, ended or refused. Each part has one place at least."""
    weights = draw(WEIGHTS)
    admission = TenantAdmission(
        weights, max_waiting=draw(st.integers(42, 80)), max_waiting_tokens=draw(st.integers(10, 1000))
    )
    numbers = st.integers(0, len(weights) - 1)
    for number, act, num_tokens in draw(st.lists(st.tuples(numbers, st.integers(0, 9), st.integers(1, 60)))):
        if act == 0:
            admission.end(number)
        elif act == 1 and admission.places[number]:
            admission.places[number][-1].begin()
        else:
            admission.admits(number, num_tokens)
    return admission


def parts(admission: TenantAdmission, size: int) -> list[int]:
    """Returns the parts of half of `size`, by share."""
    return [max(1, int(size // 2 * tenant.share)) for tenant in admission.tenants]


@given(busy_admissions(), st.integers(0, 4))
def test_a_tenant_below_its_part_of_the_places_gets_one(admission: TenantAdmission, flooding: int) -> None:
    admission.flood(flooding % len(admission.places))
    for number, part in enumerate(parts(admission, admission._limits.max_waiting)):
        while admission.places[number]:  # so that no tokens wait, which have bounds of their own
            admission.end(number)
        admission._limits = AdmissionLimits(max_waiting=admission._limits.max_waiting, max_queue_s=1e6)
        assert [admission.admits(number) for _ in range(part)] == [True] * part


@example([1, 1], 10, [(0, 9)])  # it came while none waited
@given(WEIGHTS, st.integers(10, 500), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 50)), max_size=40))
def test_a_tenant_below_its_part_of_the_tokens_is_admitted(
    weights: list[int], max_tokens: int, requests: list[tuple[int, int]]
) -> None:
    admission = TenantAdmission(weights, max_waiting=10_000, max_waiting_tokens=max_tokens)
    for number, num_tokens in requests:
        admission.admits(number % len(weights), min(num_tokens, max_tokens))
    admission.flood(0)
    for number, part in enumerate(parts(admission, max_tokens)):
        held = admission._held.of(admission.tenants[number]).num_tokens
        assert held >= part or admission.admits(number, part - held)


@example([1], 10, [5, 5])
@example([1], 10, [5, 6])
@example([1, 4], 10, [3, 4])
@given(WEIGHTS, st.integers(2, 500), st.lists(st.integers(1, 60), min_size=2, max_size=20))
def test_a_tenant_alone_gets_just_its_most_tokens(weights: list[int], max_tokens: int, prompts: list[int]) -> None:
    admission = TenantAdmission(weights, max_waiting=10_000, max_waiting_tokens=max_tokens)
    enter = [admission.admits(0, num_tokens) for num_tokens in prompts]
    assert all(enter) == (sum(prompts) <= max_tenant_tokens(admission.tenants[0].share, max_tokens))


@given(busy_admissions())
def test_the_bounds_hold_for_all_tenants_together(admission: TenantAdmission) -> None:
    for number in range(len(admission.places)):
        admission.flood(number, 7)
    stats, limits = admission.stats, admission._limits
    assert stats.num_in_flight == sum(map(len, admission.places)) <= NUM_SLOTS + limits.max_waiting
    assert stats.num_waiting_tokens <= limits.max_waiting_tokens + 60  # one that came alone may have had more


@given(busy_admissions())
def test_without_requests_no_holding_is_left(admission: TenantAdmission) -> None:
    for number, places in enumerate(admission.places):
        while places:
            admission.end(number)
    assert (admission.stats.num_in_flight, admission.stats.num_waiting_tokens, admission._held._holdings) == (0, 0, {})


@pytest.mark.parametrize("size", [1, 2, 7, 10])
def test_the_only_tenant_has_all(size: int) -> None:
    admission = TenantAdmission([1], num_slots=1, max_waiting=size - 1, max_waiting_tokens=size)
    assert [admission.admits(0) for _ in range(size + 1)] == [True] * size + [False]


def test_a_flood_takes_the_common_half_and_its_own_part() -> None:
    admission = TenantAdmission([1, 3], num_slots=4, max_waiting=12)
    admission.flood(0)
    assert len(admission.places[0]) == 4 + 6 + 1
    assert [admission.admits(1) for _ in range(5)] == [True] * 4 + [False]


@given(WEIGHTS, st.integers(1, 20), st.integers(1, 20), st.lists(st.integers(0, 4)))
def test_while_fewer_are_admitted_than_run_every_request_is_admitted(
    weights: list[int], num_slots: int, max_waiting: int, others: list[int]
) -> None:
    admission = TenantAdmission(weights, num_slots, max_waiting=max_waiting)
    assert all(admission.admits(number % len(weights)) for number in others[:num_slots])
    admission.flood(0)
    assert admission.stats.num_in_flight >= num_slots


@given(WEIGHTS, st.integers(1, 20), st.integers(1, 20))
def test_a_tenant_alone_gets_just_its_most_places(weights: list[int], num_slots: int, max_waiting: int) -> None:
    admission = TenantAdmission(weights, num_slots, max_waiting=max_waiting)
    admission.flood(0)
    assert admission.stats.num_in_flight == max_tenant_places(admission.tenants[0].share, num_slots, max_waiting)


def test_refusals_of_others_do_not_put_off_when_to_come_back() -> None:
    admission = TenantAdmission([1, 1], num_slots=1, max_waiting=3)
    admission.flood(0)
    for _ in range(20):
        admission.clock.now_s += 2
        admission.end(0)
        assert admission.admits(0)
    times = []
    for number in (0, 0, 0, 1):
        with pytest.raises(OverloadedError) as refused:
            admission.check(tenant=admission.tenants[number])
        times.append(refused.value.retry_after_s)
    assert times == pytest.approx([2.0, 4.0, 6.0, 2.0])


def test_with_more_tenants_than_places_the_first_of_them_come() -> None:
    admission = TenantAdmission([1] * 40, num_slots=2, max_waiting=8)
    admission.flood(0)
    assert [admission.admits(number) for number in range(1, 40)] == [True] * 3 + [False] * 36


def test_a_tenants_share_is_that_of_its_newest_request() -> None:
    quotas = TenantQuotas()
    for share in (0.5, 0.25):
        quotas.enter(Tenant("a", share), 1)
    assert quotas.turn_share(Tenant("b", 0.75)) == 0.75


@pytest.mark.parametrize(("max_tokens", "words"), [(100, "are kept for others"), (7, "the rest is for others")])
def test_a_refusal_names_the_quotas(max_tokens: int, words: str) -> None:
    admission = TenantAdmission([1, 1], num_slots=4, max_waiting=4, max_waiting_tokens=max_tokens)
    admission.flood(0)
    with pytest.raises(OverloadedError, match=words) as refused:
        admission.enter(1, None, admission.tenants[0])
    assert refused.value.retry_after_s == 1


class TestPrediction:
    """A tenant waits behind its own requests and the turns of the others, not behind all of them."""

    def jammed(self, weights: list[int]) -> TenantAdmission:
        """Returns one in which the first tenant has 54 requests, of which 4 run, and one ends every two seconds."""
        admission = TenantAdmission(weights, num_slots=4, max_waiting=100)
        for _ in range(54):
            admission.admits(0)
        for _ in range(50):
            admission.clock.now_s += 2
            admission.end(0)
            admission.admits(0)
        return admission

    def wait_s(self, admission: TenantAdmission, number: int) -> float:
        return admission._wait_s(admission._ahead_of(admission.tenants[number]))

    @pytest.mark.parametrize(("weights", "num_ends"), [([1, 1], 2), ([3, 1], 4), ([1, 3], 2)])
    def test_a_tenant_without_waiting_requests_waits_for_its_turn(self, weights: list[int], num_ends: int) -> None:
        admission = self.jammed(weights)
        assert self.wait_s(admission, 1) == pytest.approx(2.0 * num_ends)
        assert admission.predicted_wait_s == self.wait_s(admission, 0) == pytest.approx(2.0 * 51)

    def test_a_tenant_with_many_waits_for_all_of_them(self) -> None:
        admission = self.jammed([1, 1])
        for _ in range(5):
            admission.admits(1)
        assert self.wait_s(admission, 1) == pytest.approx(2.0 * 12)
        admission.places[1][0].begin()
        assert self.wait_s(admission, 1) == pytest.approx(2.0 * 10)

    def test_it_is_never_longer_than_behind_all_requests(self) -> None:
        admission = self.jammed([1, 1])
        admission.admits(1)
        assert self.wait_s(admission, 0) == admission.predicted_wait_s

    def test_an_impatient_request_is_admitted_beside_a_flood(self) -> None:
        admission = self.jammed([1, 1])
        assert not admission.admits(0, max_queue_s=30.0)
        assert admission.admits(1, max_queue_s=30.0)

    def test_prompts_of_others_are_before_it_only_in_their_turns(self) -> None:
        admission = TenantAdmission([1, 1], num_slots=100)
        for _ in range(20):
            admission.admits(0, 100)
        for place in admission.places[0][:10]:
            admission.clock.now_s += 2
            place.begin()
        assert self.wait_s(admission, 1) == 0 and self.wait_s(admission, 0) == pytest.approx(20.0)
        admission.admits(1, 200)
        assert self.wait_s(admission, 1) == pytest.approx(400 / 50)
        assert self.wait_s(admission, 0) == pytest.approx(1200 / 50)
