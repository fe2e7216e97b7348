"""A write that does not complete is reported once, in time; any other is not."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from server.limits.write_timeout import WriteTimeout


class Loop:
    """An event loop whose timers fire when the test moves the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self._timers: list[tuple[float, Callable[[], None]]] = []
        monkeypatch.setattr("server.limits.write_timeout.time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr("server.limits.write_timeout.asyncio", SimpleNamespace(get_running_loop=lambda: self))

    def call_later(self, delay_s: float, act: Callable[[], None]) -> "Loop":
        self._timers.append((self.now_s + delay_s, act))
        return self

    def cancel(self) -> None:
        self._timers.clear()

    @property
    def num_timers(self) -> int:
        return len(self._timers)

    def run_until(self, time_s: float) -> None:
        while self._timers and self._timers[0][0] <= time_s:
            self.now_s, act = self._timers.pop(0)
            act()
        self.now_s = time_s


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    return Loop(monkeypatch)


@pytest.fixture
def stalls() -> list[float]:
    return []


def watch_of(loop: Loop, stalls: list[float]) -> WriteTimeout:
    return WriteTimeout(10.0, lambda: stalls.append(loop.now_s))


@pytest.mark.parametrize("begin_s", [100.0, 103.0, 109.9, 110.0, 117.0])
def test_a_send_that_never_ends_is_noticed_at_its_limit_and_once(
    loop: Loop, stalls: list[float], begin_s: float
) -> None:
    watch = watch_of(loop, stalls)
    loop.run_until(begin_s)
    watch.begin()
    loop.run_until(200.0)
    assert stalls == [begin_s + 10] and watch.has_stalled and loop.num_timers == 0


def test_sends_that_end_in_time_are_no_stall_however_many(loop: Loop, stalls: list[float]) -> None:
    watch = watch_of(loop, stalls)
    for start_s in range(100, 200, 10):
        loop.run_until(start_s)
        watch.begin()
        loop.run_until(start_s + 9.9)
        watch.end()
    assert stalls == [] and not watch.has_stalled


def test_a_stream_without_new_tokens_is_no_stall(loop: Loop, stalls: list[float]) -> None:
    watch = watch_of(loop, stalls)
    watch.begin()
    watch.end()
    loop.run_until(1000.0)
    assert stalls == [] and loop.num_timers == 1


def test_a_keep_alive_that_waits_behind_an_event_gives_it_no_more_time(loop: Loop, stalls: list[float]) -> None:
    watch = watch_of(loop, stalls)
    watch.begin()
    loop.run_until(108.0)
    watch.begin()
    loop.run_until(200.0)
    assert stalls == [110.0]


def test_after_its_stop_nothing_is_watched(loop: Loop, stalls: list[float]) -> None:
    watch = watch_of(loop, stalls)
    watch.begin()
    watch.stop()
    loop.run_until(200.0)
    assert stalls == [] and loop.num_timers == 0


def test_a_watch_is_on_the_running_loop() -> None:
    async def check() -> None:
        stalled = asyncio.Event()
        watch = WriteTimeout(0.01, stalled.set)
        watch.begin()
        await asyncio.wait_for(stalled.wait(), 20)
        assert watch.has_stalled

    asyncio.run(check())
