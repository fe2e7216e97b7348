"""Full garbage collections, which hold up the event loop, and what makes them seldom needed."""

import asyncio
import gc
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing

import pytest

from server.core.request_record import RequestRecord
from server.generation.sse import EventStream
from server.generation.usage import UsageCounter
from server.runtime import garbage
from server.runtime.garbage import NUM_DUE, NUM_POSTPONED, collecting_while_idle
from tests.server.live_server import LiveServer
from tests.soak.server import ROOT


@pytest.fixture
def collections() -> Generator[list[int], None, None]:
    """The generations that were collected so far. Nothing is collected by itself."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            seen.append(info["generation"])

    gc.collect()
    gc.disable()
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    gc.enable()


def num_kept() -> Counter[type]:
    kinds = RequestRecord, UsageCounter, EventStream
    return Counter(type(each) for each in gc.get_objects() if type(each) in kinds)


def leave(server: LiveServer) -> None:
    """Leaves a stream that has begun."""
    server.engine.hold_at = 3
    with closing(server.connect()) as connection:
        connection.sendall(server.request_bytes("/v1/completions", {"prompt": "Hi", "stream": True}))
        received = b""
        while b"data:" not in received:
            received += connection.recv(65536) or pytest.fail("the server closed the stream")
    server.wait_until_idle()
    server.engine.hold_at = None


KINDS: dict[str, Callable[[LiveServer], object]] = {
    "whole": lambda server: server.complete("Hi", max_tokens=3),
    "stream": lambda server: server.complete("Hi", max_tokens=3, stream=True),
    "chat": lambda server: server.chat("Hi", max_tokens=3, stream=True),
    "responses": lambda server: server.respond("Hi", max_output_tokens=3, stream=True),
    "messages": lambda server: server.message("Hi", max_tokens=3, stream=True),
    "ollama": lambda server: server.ollama("Hi", stream=True),
    "refused": lambda server: server.complete("Hi", max_tokens=-1),
    "left": leave,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_ended_leaves_nothing_to_the_garbage_collector(
    kind: str, server: LiveServer, collections: list[int]
) -> None:
    KINDS[kind](server)
    server.client.get("/health")  # a connection keeps its newest request
    before = num_kept()
    for _ in range(3):
        KINDS[kind](server)
    server.client.get("/health")
    server.wait_until(lambda: num_kept() <= before)
    assert not collections


async def check_when_full_collections_are_made() -> None:
    seen: list[int] = []
    is_idle = False
    gc.disable()
    gc.callbacks.append(lambda phase, info: seen.append(info["generation"]) if phase == "stop" else None)
    with collecting_while_idle(lambda: is_idle):
        assert gc.get_threshold()[2] == NUM_POSTPONED
        for _ in range(NUM_DUE):
            gc.collect(1)
        await asyncio.sleep(0.05)
        assert 2 not in seen
        is_idle = True
        while 2 not in seen:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert seen.count(2) == 1  # no other one is due


def check_alone() -> None:
    garbage.PAUSE_S = 0.001
    before = gc.get_threshold()
    asyncio.run(asyncio.wait_for(check_when_full_collections_are_made(), 20))
    assert gc.get_threshold() == before


def test_full_collections_are_made_while_nothing_is_under_way() -> None:
    """In a process of its own: the servers of other tests collect, too."""
    script = f"from {__name__} import check_alone; check_alone()"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0
