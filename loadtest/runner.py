"""Schedules of requests: closed loop, open loop, long prompts among steady streams, sessions. The caller sends."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from itertools import chain, islice
from typing import Any

from loadtest.record import Outcome, Record
from loadtest.sessions.session import Session
from loadtest.workload import RequestSpec

Send = Callable[[RequestSpec, float | None], Coroutine[Any, Any, object]]

SendTurn = Callable[[RequestSpec, float | None], Coroutine[Any, Any, Record]]

_NUM_READY = 256


def limited(specs: Iterator[RequestSpec], num_requests: int | None, duration_s: float | None) -> Iterator[RequestSpec]:
    """Yields at most `num_requests`, and none later than `duration_s` after the first is taken; None for no limit.

    The first requests are drawn at once, so that drawing a long prompt delays no stream while it is measured.
    """
    specs = islice(specs, num_requests)
    return _until(duration_s, chain(list(islice(specs, _NUM_READY)), specs))


def _until(duration_s: float | None, specs: Iterator[RequestSpec]) -> Iterator[RequestSpec]:
    began_s = time.perf_counter()
    for spec in specs:
        if duration_s is not None and time.perf_counter() - began_s >= duration_s:
            return
        yield spec


async def closed_loop(send: Send, specs: Iterator[RequestSpec], concurrency: int) -> None:
    """Keeps `concurrency` requests in flight: the next one starts when one ends."""

    async def stream() -> None:
        for spec in specs:
            await send(spec, None)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(stream())


async def open_loop(
    send: Send, specs: Iterator[RequestSpec], offsets_s: Iterable[float], max_in_flight: int | None = None
) -> None:
    """Sends each request when it is due, however many are in flight.

    With `max_in_flight`, a request that is due may have to wait for another to end; its send lag includes that.
    """
    slots = asyncio.Semaphore(max_in_flight) if max_in_flight else None

    async def one(spec: RequestSpec, due_s: float) -> None:
        try:
            await send(spec, due_s)
        finally:
            if slots:
                slots.release()

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for offset_s, spec in zip(offsets_s, specs, strict=False):
            await _sleep_until(began_s + offset_s)
            if slots:
                await slots.acquire()
            group.create_task(one(spec, began_s + offset_s))


async def long_among_decoders(
    send: Send, decoders: Iterator[RequestSpec], longs: Iterator[RequestSpec], num_streams: int, every_s: float
) -> None:
    """Keeps `num_streams` streams decoding and sends a long request every `every_s`, until the streams have ended.

    Then it waits for the long requests still in flight.
    """
    began_s = time.perf_counter()

    async with asyncio.TaskGroup() as group:

        async def arrive() -> None:
            for number, spec in enumerate(longs, start=1):
                due_s = began_s + number * every_s
                await _sleep_until(due_s)
                group.create_task(send(spec, due_s))

        arrivals = group.create_task(arrive())
        await closed_loop(send, decoders, num_streams)
        arrivals.cancel()


async def session_loop(
    send: SendTurn, sessions: Iterator[Session], concurrency: int, think_s: float, duration_s: float | None
) -> None:
    """Keeps `concurrency` sessions going: the next one begins when one ends.

    A turn is sent when the one before has ended and was thought about, for `think_s` on average. A turn that fails ends
    its session; no turn begins after `duration_s`.
    """
    ends_s = time.perf_counter() + (math.inf if duration_s is None else duration_s)

    async def agent() -> None:
        for session in sessions:
            turn: RequestSpec | None = session.first_turn()
            pause_s = 0.0
            while turn is not None:
                if time.perf_counter() + pause_s >= ends_s:
                    return
                await asyncio.sleep(pause_s)
                reply = (await send(turn, None)).reply
                turn = session.next_turn(reply.answer) if reply.outcome is Outcome.OK else None
                pause_s = session.think_s(think_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(agent())


async def _sleep_until(due_s: float) -> None:
    """Sleeps until `due_s`. Even if that has passed, other tasks run once: late requests must not keep the others from
    being sent."""
    await asyncio.sleep(0)
    while (left_s := due_s - time.perf_counter()) > 0:
        await asyncio.sleep(left_s)
