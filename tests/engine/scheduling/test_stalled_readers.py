"""A request whose reader has stopped reading makes room for whoever waits, and its answer stays the same."""

from collections import Counter

import pytest

from engine.core.request import Request
from engine.scheduling.fair_queue import FairQueue
from tests.engine.requests import queued
from tests.engine.scheduling.tenant_load import LONG, PLACES, Load, flooded


def stalled(load: Load, *names: str, is_stalled: bool = True) -> None:
    for name in names:
        load.engine.set_stalled(name, is_stalled)


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_a_stalled_stream_gives_up_its_place_first_to_its_own_tenant_too(tenant: str) -> None:
    load = Load()
    for number in range(PLACES):
        load.send(f"a{number}", max_tokens=LONG)
    for _ in range(5):
        load.step()
    stalled(load, "a1")  # neither the newest nor, after so few tokens, of one that had more than another
    load.send(f"{tenant}9", max_tokens=LONG)
    load.step()
    load.step()
    assert f"{tenant}9" in load.engine._scheduler.running_ids and "a1" not in load.engine._scheduler.running_ids
    assert load.num_preemptions == 1
    load.finish()
    assert {len(output) for output in load.outputs.values()} == {LONG}


def test_while_nobody_waits_a_stalled_stream_runs_on() -> None:
    load = Load()
    load.send("a0", max_tokens=LONG)
    stalled(load, "a0")
    assert load.steps_until_ended("a0") == LONG
    assert load.num_preemptions == 0


def test_stalled_streams_wait_behind_all_others_until_they_are_read() -> None:
    load = flooded()
    running = load.engine._scheduler.running_ids
    stalled(load, *running)
    for number in range(3 * PLACES):
        load.send(f"b{number}", max_tokens=20)
    for _ in range(8):
        load.step()
    assert not set(running) & set(load.engine._scheduler.running_ids)
    stalled(load, running[0], is_stalled=False)
    load.steps_until_ended("b11")
    assert len(load.outputs[running[0]]) > len(load.outputs[running[1]])
    load.finish()
    assert {len(output) for output in load.outputs.values()} == {LONG, 20}


def test_a_stalled_stream_that_waits_takes_nobodys_place() -> None:
    """Also where its tenant has had much less than the one that runs."""
    load = flooded()
    before = load.num_preemptions
    load.send("b0", max_tokens=LONG)
    stalled(load, "b0")
    for _ in range(20):
        load.step()
    assert load.running == Counter(a=PLACES) and load.num_preemptions == before
    load.finish()


def test_blocks_of_stalled_streams_are_taken_first() -> None:
    load = Load(num_blocks=60, max_num_seqs=64)
    for number in range(3):
        load.send(f"a{number}", num_prompt=40, max_tokens=100)
    for _ in range(10):
        load.step()
    stalled(load, "a0")
    while not load.num_preemptions:
        load.step()
    assert load.engine._scheduler.running_ids == ["a1", "a2"]
    load.finish()


def test_marks_for_unknown_requests_are_passed_over() -> None:
    load = Load()
    stalled(load, "a0")
    load.send("a0", max_tokens=1)
    load.finish()


def requests_of(queue: FairQueue, *names: str) -> dict[str, Request]:
    requests = {name: queued(name, [1], tenant=name[0]) for name in names}
    for number, request in enumerate(requests.values()):
        request.number = number
        queue.add(request)
    return requests


def order_of(queue: FairQueue) -> list[str]:
    """Returns the names of the queue's requests as they are taken from it."""
    names = []
    while (request := queue.next()) is not None:
        names.append(request.request_id)
        queue.remove(request)
    return names


def test_stalled_requests_are_last_in_the_queue_whose_ever_they_are_and_whatever_their_tenants_had() -> None:
    queue = FairQueue()
    requests = requests_of(queue, "a0", "a1", "b0", "b1")
    queue.charge(requests["b0"], 1000)
    queue.set_stalled(requests["a0"], True)
    queue.set_stalled(requests["a1"], True)
    queue.set_stalled(requests["b0"], True)
    assert queue.num_before(requests["b0"]) == 1
    queue.set_stalled(requests["a1"], False)
    assert order_of(queue) == ["a1", "b1", "a0", "b0"]
