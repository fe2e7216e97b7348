"""The connection of server and engine: any amount passes in order, an idle end sleeps, and an end is noticed."""

import asyncio
import os
import socket
from collections.abc import Callable

import msgspec
import pytest

from engine.core.messages import AbortRequests, EngineFailure, FromEngine, Heartbeat, Shutdown, ToEngine
from engine.process import transport
from engine.process.transport import _READ_BYTES, EngineLink, ServerGoneError, ServerLink
from tests.engine.process.links import engine_link, framed, linked, on_both_loops


def test_thousands_of_messages_both_ways_keep_their_order() -> None:
    """The kernel holds only some of the messages: the rest waits in the server, and the engine waits for the server."""

    async def check() -> None:
        received: list[float] = []
        with linked(lambda message: received.append(getattr(message, "time_s", -1.0))) as (server, engine):
            sending = asyncio.create_task(asyncio.to_thread(send_all, engine))
            for number in range(20000):
                server.send(AbortRequests([str(number)]))
            await sending
            got: list[ToEngine] = []
            while len(received) < 20000 or len(got) < 20000:
                got += engine.receive(0.0)
                await asyncio.sleep(0)
            assert received == [float(number) for number in range(20000)]
            assert got == [AbortRequests([str(number)]) for number in range(20000)]

    def send_all(engine: EngineLink) -> None:
        for number in range(20000):
            engine.send(Heartbeat(float(number)))

    on_both_loops(check)


def test_a_message_may_be_larger_than_what_the_kernel_holds() -> None:
    async def check() -> None:
        large = EngineFailure("a", "b", "c" * 10**7)
        seen: asyncio.Queue[FromEngine] = asyncio.Queue()
        with linked(seen.put_nowait) as (server, engine):
            await asyncio.to_thread(engine.send, large)
            assert await seen.get() == large
            server.send(AbortRequests(["x" * 10**7]))
            server.send(Shutdown())
            got: list[ToEngine] = []
            while len(got) < 2:
                got += await asyncio.to_thread(engine.receive, 10.0)
            assert got == [AbortRequests(["x" * 10**7]), Shutdown()]

    on_both_loops(check)


def test_others_have_their_turns_while_a_long_message_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_READ_BYTES", 64)

    async def check() -> None:
        seen: list[FromEngine] = []
        num_turns = 0
        with linked(seen.append) as (_, engine):
            engine.send(EngineFailure("a", "b", "c" * 50_000))
            while not seen:
                await asyncio.sleep(0)
                num_turns += 1
        assert num_turns > 50_000 / 64 / transport._READS_A_TURN

    on_both_loops(check)


def test_an_engine_sees_that_something_has_arrived_and_leaves_it() -> None:
    async def check() -> None:
        with linked(pytest.fail) as (server, engine):
            assert not engine.has_arrived()
            server.send(AbortRequests(["x"]))
            assert engine.has_arrived() and engine.has_arrived()
            assert engine.receive(0.0) == [AbortRequests(["x"])]
            assert not engine.has_arrived()
            server.close()
            assert engine.has_arrived()

    on_both_loops(check)


def test_what_the_engine_sent_before_its_end_is_received_after_it() -> None:
    async def check() -> None:
        seen: list[FromEngine] = []
        with linked(seen.append) as (server, engine):
            for number in range(200):
                engine.send(EngineFailure("a", "b", "c" * number))
            engine.close()
            server.send(Shutdown())
            server.receive()
            assert seen == [EngineFailure("a", "b", "c" * number) for number in range(200)]

    on_both_loops(check)


def test_a_server_whose_engine_has_ended_sleeps() -> None:
    """A server must stop to watch a socket that was closed, since its end can be read for ever."""

    async def check() -> None:
        with linked(pytest.fail) as (server, engine):
            engine.close()
            await until(lambda: not is_watched(server))
            server.receive()
            server.send(Shutdown())
            assert not is_watched(server) and not is_watched(server, for_writing=True)

    asyncio.run(asyncio.wait_for(check(), 30))


def test_a_server_with_nothing_left_to_send_sleeps() -> None:
    async def check() -> None:
        with linked(pytest.fail) as (server, engine):
            server.send(AbortRequests(["x" * 10**6]))
            assert is_watched(server, for_writing=True)
            while not engine.receive(0.0):
                await asyncio.sleep(0)
            await until(lambda: not is_watched(server, for_writing=True))

    asyncio.run(asyncio.wait_for(check(), 30))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def is_watched(link: ServerLink, for_writing: bool = False) -> bool:
    """Returns whether asyncio's loop waits for the engine's messages, or until the server's can be written."""
    loop = asyncio.get_running_loop()
    key = loop._selector.get_map().get(link._socket.fileno())  # type: ignore[attr-defined]
    return key is not None and key.data[for_writing] is not None


def test_a_closed_link_takes_messages_and_keeps_no_descriptor() -> None:
    async def check() -> None:
        link = ServerLink(pytest.fail, pytest.fail)
        ends = (link._socket, link.engine_end)
        link.close()
        link.close()
        link.send(Shutdown())
        link.receive()
        assert [end.fileno() for end in ends] == [-1, -1]

    asyncio.run(check())


def test_the_engine_notices_that_the_server_is_gone() -> None:
    with engine_link() as (link, server_end):
        assert link.receive(0.0) == []
        server_end.close()
        link.send(Heartbeat(0.0))
        with pytest.raises(ServerGoneError):
            link.receive(60.0)


def test_the_engine_receives_what_the_server_sent_before_its_end() -> None:
    with engine_link() as (link, server_end):
        link.send(Heartbeat(0.0))
        server_end.sendall(framed(msgspec.msgpack.encode(Shutdown())))
        server_end.close()  # with something unread: a reset
        assert link.receive(60.0) == [Shutdown()]
        with pytest.raises(ServerGoneError):
            link.receive(60.0)


def test_the_engine_receives_all_that_has_arrived_at_once() -> None:
    messages = [AbortRequests(["x" * (_READ_BYTES // 2)]) for _ in range(5)]
    with engine_link() as (link, server_end):
        server_end.sendall(b"".join(framed(msgspec.msgpack.encode(each), n) for n, each in enumerate(messages)))
        assert link.receive(0.0) == messages


def test_a_last_message_that_fills_a_whole_read_is_received() -> None:
    empty = len(framed(msgspec.msgpack.encode(AbortRequests(["x" * 1000]))))
    message = AbortRequests(["x" * (1000 + _READ_BYTES - empty)])
    with engine_link() as (link, server_end):
        server_end.sendall(framed(msgspec.msgpack.encode(message)))
        server_end.close()
        assert link.receive(60.0) == [message]
        with pytest.raises(ServerGoneError):
            link.receive(60.0)


def test_what_the_engine_starts_does_not_hold_the_connection() -> None:
    server_end, engine_end = socket.socketpair()
    engine_end.set_inheritable(True)
    link = EngineLink(engine_end.detach())
    assert not os.get_inheritable(link._socket.fileno())
    link.close()
    server_end.close()
