"""Whatever one tenant asks for: there is room for the others up to their parts, and never more inside than may be."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.client.admission import AdmissionControl, AdmissionLimits, Place
from engine.client.interface import Tenant
from engine.client.tenant_quotas import TenantQuotas, max_tenant_places, max_tenant_tokens
from engine.core.errors import OverloadedError

WEIGHTS = st.lists(st.integers(1, 5), min_size=1, max_size=5)
NUM_SLOTS = 3


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Room(AdmissionControl):
    """With a clock of its own, and the places of each tenant in the order they were taken."""

    def __init__(self, weights: list[int], num_slots: int = NUM_SLOTS, **limits: Any) -> None:
        self.clock = Clock()
        super().__init__(AdmissionLimits(**{"max_queue_s": 1e6, **limits}), num_slots, 100, self.clock)
        self.tenants = [Tenant(f"key-{index}", weight / sum(weights)) for index, weight in enumerate(weights)]
        self.places: list[list[Place]] = [[] for _ in weights]

    def lets_in(self, number: int, num_tokens: int = 1, max_queue_s: float | None = None) -> bool:
        try:
            self.places[number].append(self.enter(num_tokens, max_queue_s, self.tenants[number]))
        except OverloadedError:
            return False
        return True

    def flood(self, number: int, num_tokens: int = 1) -> None:
        while self.lets_in(number, num_tokens):
            pass

    def end(self, number: int) -> None:
        if self.places[number]:
            self.places[number].pop(0).leave()


@st.composite
def busy_rooms(draw: st.DrawFn) -> Room:
    """After requests of any tenants and sizes, begun, ended or refused. There is a place at least in each part."""
    weights = draw(WEIGHTS)
    room = Room(weights, max_waiting=draw(st.integers(42, 80)), max_waiting_tokens=draw(st.integers(10, 1000)))
    numbers = st.integers(0, len(weights) - 1)
    for number, act, num_tokens in draw(st.lists(st.tuples(numbers, st.integers(0, 9), st.integers(1, 60)))):
        if act == 0:
            room.end(number)
        elif act == 1 and room.places[number]:
            room.places[number][-1].begin()
        else:
            room.lets_in(number, num_tokens)
    return room


def parts(room: Room, size: int) -> list[int]:
    """Half of it, by share."""
    return [max(1, int(size // 2 * tenant.share)) for tenant in room.tenants]


@given(busy_rooms(), st.integers(0, 4))
def test_who_has_less_than_its_part_of_the_places_gets_one(room: Room, flooding: int) -> None:
    room.flood(flooding % len(room.places))
    for number, part in enumerate(parts(room, room._limits.max_waiting)):
        while room.places[number]:  # so that no tokens wait, which have bounds of their own
            room.end(number)
        room._limits = AdmissionLimits(max_waiting=room._limits.max_waiting, max_queue_s=1e6)
        assert [room.lets_in(number) for _ in range(part)] == [True] * part


@example([1, 1], 10, [(0, 9)])  # it came while none waited
@given(WEIGHTS, st.integers(10, 500), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 50)), max_size=40))
def test_who_has_less_than_its_part_of_the_tokens_gets_in(
    weights: list[int], max_tokens: int, requests: list[tuple[int, int]]
) -> None:
    room = Room(weights, max_waiting=10_000, max_waiting_tokens=max_tokens)
    for number, num_tokens in requests:
        room.lets_in(number % len(weights), min(num_tokens, max_tokens))
    room.flood(0)
    for number, part in enumerate(parts(room, max_tokens)):
        held = room._held.of(room.tenants[number]).num_tokens
        assert held >= part or room.lets_in(number, part - held)


@example([1], 10, [5, 5])
@example([1], 10, [5, 6])
@example([1, 4], 10, [3, 4])
@given(WEIGHTS, st.integers(2, 500), st.lists(st.integers(1, 60), min_size=2, max_size=20))
def test_who_is_alone_gets_just_so_many_tokens(weights: list[int], max_tokens: int, prompts: list[int]) -> None:
    room = Room(weights, max_waiting=10_000, max_waiting_tokens=max_tokens)
    enter = [room.lets_in(0, num_tokens) for num_tokens in prompts]
    assert all(enter) == (sum(prompts) <= max_tenant_tokens(room.tenants[0].share, max_tokens))


@given(busy_rooms())
def test_the_bounds_hold_for_all_tenants_together(room: Room) -> None:
    for number in range(len(room.places)):
        room.flood(number, 7)
    stats, limits = room.stats, room._limits
    assert stats.num_in_flight == sum(map(len, room.places)) <= NUM_SLOTS + limits.max_waiting
    assert stats.num_waiting_tokens <= limits.max_waiting_tokens + 60  # one that came alone may have had more


@given(busy_rooms())
def test_an_empty_room_has_forgotten_everybody(room: Room) -> None:
    for number, places in enumerate(room.places):
        while places:
            room.end(number)
    assert (room.stats.num_in_flight, room.stats.num_waiting_tokens, room._held._holdings) == (0, 0, {})


@pytest.mark.parametrize("size", [1, 2, 7, 10])
def test_who_is_the_only_tenant_has_all(size: int) -> None:
    room = Room([1], num_slots=1, max_waiting=size - 1, max_waiting_tokens=size)
    assert [room.lets_in(0) for _ in range(size + 1)] == [True] * size + [False]


def test_a_flood_takes_the_common_half_and_its_own_part() -> None:
    room = Room([1, 3], num_slots=4, max_waiting=12)
    room.flood(0)
    assert len(room.places[0]) == 4 + 6 + 1
    assert [room.lets_in(1) for _ in range(5)] == [True] * 4 + [False]


@given(WEIGHTS, st.integers(1, 20), st.integers(1, 20), st.lists(st.integers(0, 4)))
def test_while_fewer_are_inside_than_run_whoever_comes_gets_in(
    weights: list[int], num_slots: int, max_waiting: int, others: list[int]
) -> None:
    room = Room(weights, num_slots, max_waiting=max_waiting)
    assert all(room.lets_in(number % len(weights)) for number in others[:num_slots])
    room.flood(0)
    assert room.stats.num_in_flight >= num_slots


@given(WEIGHTS, st.integers(1, 20), st.integers(1, 20))
def test_a_tenant_alone_gets_the_places_that_it_is_told(weights: list[int], num_slots: int, max_waiting: int) -> None:
    room = Room(weights, num_slots, max_waiting=max_waiting)
    room.flood(0)
    assert room.stats.num_in_flight == max_tenant_places(room.tenants[0].share, num_slots, max_waiting)


def test_refusals_of_others_do_not_put_off_when_to_come_back() -> None:
    room = Room([1, 1], num_slots=1, max_waiting=3)
    room.flood(0)
    for _ in range(20):
        room.clock.now_s += 2
        room.end(0)
        assert room.lets_in(0)
    times = []
    for number in (0, 0, 0, 1):
        with pytest.raises(OverloadedError) as refused:
            room.check(tenant=room.tenants[number])
        times.append(refused.value.retry_after_s)
    assert times == pytest.approx([2.0, 4.0, 6.0, 2.0])


def test_with_more_tenants_than_places_the_first_of_them_come() -> None:
    room = Room([1] * 40, num_slots=2, max_waiting=8)
    room.flood(0)
    assert [room.lets_in(number) for number in range(1, 40)] == [True] * 3 + [False] * 36


def test_a_tenants_share_is_the_one_told_last() -> None:
    shares = TenantQuotas()
    for share in (0.5, 0.25):
        shares.enter(Tenant("a", share), 1)
    assert shares.turn_share(Tenant("b", 0.75)) == 0.75


@pytest.mark.parametrize(("max_tokens", "words"), [(100, "kept for other API keys"), (7, "for other API keys")])
def test_what_a_refused_one_is_told(max_tokens: int, words: str) -> None:
    room = Room([1, 1], num_slots=4, max_waiting=4, max_waiting_tokens=max_tokens)
    room.flood(0)
    with pytest.raises(OverloadedError, match=words) as refused:
        room.enter(1, None, room.tenants[0])
    assert refused.value.retry_after_s == 1


class TestPrediction:
    """A tenant waits behind its own requests and the turns of the others, not behind all of them."""

    def jammed(self, weights: list[int]) -> Room:
        """The first tenant has 54 inside, of which 4 run, and one ends every two seconds."""
        room = Room(weights, num_slots=4, max_waiting=100)
        for _ in range(54):
            room.lets_in(0)
        for _ in range(50):
            room.clock.now_s += 2
            room.end(0)
            room.lets_in(0)
        return room

    def wait_s(self, room: Room, number: int) -> float:
        return room._wait_s(room._ahead_of(room.tenants[number]))

    @pytest.mark.parametrize(("weights", "num_ends"), [([1, 1], 2), ([3, 1], 4), ([1, 3], 2)])
    def test_who_has_none_waiting_waits_for_the_turns_before_its_own(self, weights: list[int], num_ends: int) -> None:
        room = self.jammed(weights)
        assert self.wait_s(room, 1) == pytest.approx(2.0 * num_ends)
        assert room.predicted_wait_s == self.wait_s(room, 0) == pytest.approx(2.0 * 51)

    def test_who_has_many_waits_for_all_of_them(self) -> None:
        room = self.jammed([1, 1])
        for _ in range(5):
            room.lets_in(1)
        assert self.wait_s(room, 1) == pytest.approx(2.0 * 12)
        room.places[1][0].begin()
        assert self.wait_s(room, 1) == pytest.approx(2.0 * 10)

    def test_it_is_never_longer_than_behind_everybody(self) -> None:
        room = self.jammed([1, 1])
        room.lets_in(1)
        assert self.wait_s(room, 0) == room.predicted_wait_s

    def test_an_impatient_one_gets_in_beside_a_flood(self) -> None:
        room = self.jammed([1, 1])
        assert not room.lets_in(0, max_queue_s=30.0)
        assert room.lets_in(1, max_queue_s=30.0)

    def test_prompts_of_others_are_before_it_only_in_their_turns(self) -> None:
        room = Room([1, 1], num_slots=100)
        for _ in range(20):
            room.lets_in(0, 100)
        for place in room.places[0][:10]:
            room.clock.now_s += 2
            place.begin()
        assert self.wait_s(room, 1) == 0 and self.wait_s(room, 0) == pytest.approx(20.0)
        room.lets_in(1, 200)
        assert self.wait_s(room, 1) == pytest.approx(400 / 50)
        assert self.wait_s(room, 0) == pytest.approx(1200 / 50)
