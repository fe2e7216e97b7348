"""A tenant that had less gets a place, whatever runs; who is preempted for it had more than its share, and its answer
stays the same."""

from collections.abc import Iterator

import pytest

from engine.scheduling.prefill_budget import PrefillBudget, PrefillPace
from tests.engine.scheduling.tenant_load import LONG, PLACES, Load, flooded


def test_a_tenant_that_asks_for_little_is_not_held_up_by_one_that_asks_for_much() -> None:
    load = flooded()
    for number in range(20):
        load.send(f"b{number}", max_tokens=1)
        assert load.steps_until_ended(f"b{number}") <= 4
    assert load.num_preemptions <= 20
    load.finish()
    assert all(len(load.outputs[f"a{number}"]) == LONG for number in range(2 * PLACES))


def test_who_asks_for_little_does_not_wait_until_another_is_far_ahead() -> None:
    """A request of a that starts just before brings b's count near to a's, since idle time earns no credit."""
    load = flooded()
    for number in range(10):
        load.engine.abort_requests([f"a{number}"])
        load.send(f"a{10 + number}", max_tokens=LONG)
        for _ in range(16):  # the shortest turn of those that have a place
            load.step()
        load.send(f"b{number}", max_tokens=1)
        assert load.steps_until_ended(f"b{number}") <= 4


def test_blocks_are_given_up_as_places_are() -> None:
    load = Load(num_blocks=100, max_num_seqs=64)
    for number in range(2):
        load.send(f"a{number}", num_prompt=60, max_tokens=150)
    for _ in range(100):
        load.step()
    assert load.engine._scheduler.stats.pool.held > 75 and load.num_preemptions == 0
    load.send("b", num_prompt=100, max_tokens=1)
    assert load.steps_until_ended("b") <= 8
    assert load.num_preemptions == 1
    load.finish()


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_who_has_no_more_than_its_share_is_not_preempted(tenant: str) -> None:
    """b came later, and has had less than a: both keep half of the places, whoever asks for more."""
    load = flooded()
    for number in range(2):
        load.send(f"b{number}", max_tokens=LONG)
    for _ in range(5):
        load.step()
    assert load.running == {"a": 2, "b": 2}
    before = load.num_preemptions
    for number in range(10, 20):
        load.send(f"{tenant}{number}", max_tokens=LONG)
    for _ in range(100):
        load.step()
        assert load.running == {"a": 2, "b": 2}
    assert load.num_preemptions == before


def test_one_tenant_alone_is_never_preempted_for_its_own() -> None:
    load = flooded()
    load.finish()
    assert load.num_preemptions == 0


@pytest.mark.parametrize(("weights", "places"), [((2.0, 1.0), 4), ((2.0, 1.0), 3), ((1.0, 1.0), 1), ((3.0, 1.0), 2)])
def test_tokens_follow_the_weights_when_all_ask_for_much(weights: tuple[float, float], places: int) -> None:
    """However long they run, the counts of both differ by no more than what lets one have its turn."""
    load = Load(max_num_seqs=places)
    by_tenant = dict(zip("ab", weights, strict=True))
    for tenant, weight in by_tenant.items():
        for number in range(8 * places):
            load.send(f"{tenant}{number}", max_tokens=LONG, weight=weight)
    shares = dict.fromkeys("ab", 0.0)
    for _ in range(1000):
        for update in load.step():
            tenant = update.request_id[0]
            shares[tenant] += (len(update.token_ids) + 3 * (update.first is not None)) / by_tenant[tenant]
        assert abs(shares["a"] - shares["b"]) <= 256 + 16 * places + 3 * 2 * places
    assert min(shares.values()) > 300 and load.num_preemptions < 1000 / 16


def turns(load: Load, name: str) -> Iterator[int]:
    """Yields how many tokens the request got in each of its turns."""
    start, was_running = 0, False
    for _ in range(700):
        before = len(load.outputs[name])
        load.step()  # one that gives a place computes there
        is_running = name in load.engine._scheduler.running_ids
        if is_running != was_running and was_running and name not in load.ended:
            yield len(load.outputs[name]) - start
        if is_running and not was_running:
            start = before
        was_running = is_running


def test_no_turn_is_too_short_to_be_worth_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.scheduling.fair_queue._QUANTUM", 1.0)  # counts alone would change places at each token
    load = Load(max_num_seqs=1)
    load.send("a0", max_tokens=LONG)
    for number in range(3):
        load.send(f"{'bcd'[number]}0", max_tokens=LONG)
    lengths = list(turns(load, "a0"))
    assert lengths and min(lengths) >= 16


def test_a_prompt_of_a_tenant_that_is_behind_does_not_wait_for_the_rest_of_a_long_one() -> None:
    load = Load(max_num_batched_tokens=16)
    names = [f"a{number}" for number in range(8)]
    for name in names:
        load.send(name, num_prompt=200, max_tokens=1)
    for number in range(10):
        for _ in range(1 + number % 3):
            load.step()
        load.send(f"b{number}", max_tokens=1)
        before = load.engine.inspect(names)
        assert load.steps_until_ended(f"b{number}") == 1 and load.engine.inspect(names) == before
    load.finish()


def test_steps_are_short_where_several_tenants_share_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[bool] = []
    budget_of = PrefillPace.while_none_decodes

    def remember(pace: PrefillPace, is_shared: bool) -> PrefillBudget:
        shared.append(is_shared)
        return budget_of(pace, is_shared)

    monkeypatch.setattr(PrefillPace, "while_none_decodes", remember)
    load = Load()
    for name in "aab":
        load.send(f"{name}{len(shared)}", max_tokens=1)
        load.finish()
    assert shared == [False, False, True]
