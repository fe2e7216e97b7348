import asyncio
import time
from collections.abc import Iterator
from itertools import count

import pytest

from loadtest.runner import closed_loop, limited, long_among_decoders, open_loop
from loadtest.workload import RequestSpec


class FakeSend:
    """A sender that takes `takes_s` per request and records how many were in flight at once."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s
        self.num_ended = self.num_in_flight = self.peak_in_flight = 0
        self.sent: list[tuple[RequestSpec, float | None, float]] = []

    async def __call__(self, spec: RequestSpec, due_s: float | None) -> None:
        self.sent.append((spec, due_s, time.perf_counter()))
        self.num_in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.num_in_flight)
        await asyncio.sleep(self.takes_s)
        self.num_in_flight -= 1
        self.num_ended += 1


def specs(num: int | None = None, group: str = "all") -> Iterator[RequestSpec]:
    endless = (RequestSpec(group, [number], 1) for number in count())
    return limited(endless, num, None)


@pytest.mark.parametrize(("num", "concurrency", "peak"), [(10, 1, 1), (10, 4, 4), (3, 8, 3)])
def test_a_closed_loop_keeps_so_many_under_way(num: int, concurrency: int, peak: int) -> None:
    send = FakeSend(0.002)
    asyncio.run(closed_loop(send, specs(num), concurrency))
    assert (send.num_ended, send.peak_in_flight) == (num, peak)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    send = FakeSend(0.2)
    asyncio.run(open_loop(send, specs(12), (0.001 * number for number in count())))
    assert send.num_ended == 12
    assert send.peak_in_flight > 1


def test_an_open_loop_sends_nothing_before_it_is_due() -> None:
    send = FakeSend(0)
    began_s = time.perf_counter()
    asyncio.run(open_loop(send, specs(4), [0.0, 0.02, 0.03, 0.08]))
    assert all(due_s is not None and sent_s >= due_s for _, due_s, sent_s in send.sent)
    assert time.perf_counter() - began_s >= 0.08


def test_a_bounded_open_loop_holds_back_what_is_due() -> None:
    send = FakeSend(0.01)
    asyncio.run(open_loop(send, specs(6), (0.0 for _ in count()), max_in_flight=2))
    assert (send.num_ended, send.peak_in_flight) == (6, 2)
    lags_s = [sent_s - due_s for _, due_s, sent_s in send.sent if due_s is not None]
    assert lags_s[-1] >= 0.02


def test_arrivals_that_come_faster_than_they_are_drawn_are_sent_meanwhile() -> None:
    drawn: list[int] = []
    drawn_when_sent = []

    def draw() -> Iterator[RequestSpec]:
        for number in range(100):
            drawn.append(number)
            yield RequestSpec("all", [number], 1)

    async def send(spec: RequestSpec, due_s: float | None) -> None:
        drawn_when_sent.append(len(drawn))

    asyncio.run(open_loop(send, draw(), (0.0 for _ in count())))
    assert len(drawn_when_sent) == 100
    assert drawn_when_sent[0] <= 2


def test_an_open_loop_ends_with_the_shorter_of_arrivals_and_requests() -> None:
    few_arrivals, few_requests = FakeSend(0), FakeSend(0)
    asyncio.run(open_loop(few_arrivals, specs(9), [0.0, 0.0]))
    asyncio.run(open_loop(few_requests, specs(3), (0.0 for _ in count())))
    assert (few_arrivals.num_ended, few_requests.num_ended) == (2, 3)


def test_no_request_begins_after_the_duration_but_those_under_way_end() -> None:
    send = FakeSend(0.05)
    endless = (RequestSpec("all", [], 1) for _ in count())
    began_s = time.perf_counter()
    asyncio.run(closed_loop(send, limited(endless, None, 0.12), 2))
    assert send.num_ended == len(send.sent) >= 2
    assert all(sent_s - began_s < 5 for _, _, sent_s in send.sent)


def test_long_requests_arrive_while_the_decoders_go_on_and_are_waited_for() -> None:
    send, began_s = FakeSend(0.1), time.perf_counter()
    asyncio.run(long_among_decoders(send, specs(4, "decoders"), specs(None, "long"), num_streams=2, every_s=0.02))
    groups = [spec.group for spec, _, _ in send.sent]
    assert groups.count("decoders") == 4
    assert 1 <= groups.count("long") <= (time.perf_counter() - began_s) / 0.02
    assert all(sent_s >= due_s for _, due_s, sent_s in send.sent if due_s is not None)
    assert send.num_in_flight == 0
    assert groups[:2] == ["decoders", "decoders"]


def test_a_failing_sender_ends_the_loop() -> None:
    async def fail(spec: RequestSpec, due_s: float | None) -> None:
        raise RuntimeError("gone")

    for loop in (closed_loop(fail, specs(), 3), open_loop(fail, specs(), [0.0, 0.0])):
        with pytest.raises(ExceptionGroup):
            asyncio.run(loop)
