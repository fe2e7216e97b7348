"""Messages over the wire: what is sent arrives equal; what is lost or is no message ends the connection."""

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Phase, TokenLogprobs
from engine.config import EngineConfig
from engine.messages import (
    AbortRequests,
    AddRequest,
    EngineFailure,
    EngineReady,
    FirstTokenInfo,
    FromEngine,
    Heartbeat,
    RequestRefused,
    RequestUpdate,
    Shutdown,
    Start,
    StepUpdate,
    ToEngine,
)
from engine.request import FinishReason
from engine.sampling_params import SamplingParams
from engine.stats import PoolStats, StepStats
from engine.transport import _READ_BYTES, BrokenLinkError, EngineLink, ServerGoneError, ServerLink
from tests.engine import fake_engine_process as fake

texts = st.text(st.characters(codec="utf-8"), max_size=8)
numbers = st.integers(0, 2**31)
times = st.floats(allow_nan=False, allow_infinity=False)
ids = st.lists(numbers, max_size=5)
params = st.builds(
    SamplingParams,
    max_tokens=numbers,
    temperature=st.floats(0, 2),
    seed=st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=5), max_size=3).map(tuple),
    logit_bias=st.dictionaries(numbers, st.floats(-100, 100), max_size=3),
    bad_words=st.lists(st.lists(numbers, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
)
configs = st.builds(EngineConfig, model=texts, num_blocks=st.none() | st.integers(1, 100))
logprobs = st.builds(TokenLogprobs, numbers, times, numbers, st.lists(st.tuples(numbers, times), max_size=2).map(tuple))
firsts = st.builds(
    FirstTokenInfo, st.none() | times, numbers, numbers, st.none() | st.lists(st.binary(max_size=9), max_size=2)
)
updates = st.builds(
    RequestUpdate,
    texts,
    ids,
    st.lists(logprobs, max_size=2),
    st.none() | firsts,
    st.none() | st.sampled_from(FinishReason),
    st.none() | numbers,
    numbers,
    st.binary(max_size=4),
    st.none() | texts,
)
stats = st.builds(
    StepStats,
    st.none() | st.sampled_from(Phase),
    *(numbers, numbers, times, times, numbers, numbers),
    st.builds(PoolStats, numbers, numbers, numbers),
    *(numbers, numbers, numbers),
)
to_engine = st.one_of(
    st.builds(Start, configs, numbers),
    st.builds(AddRequest, request_id=texts, prompt_token_ids=ids, params=params, arrival_s=times, output_token_ids=ids),
    st.builds(AbortRequests, st.lists(texts, max_size=3)),
    st.just(Shutdown()),
)
from_engine = st.one_of(
    st.builds(EngineReady, configs.map(fake.info_of)),
    st.builds(StepUpdate, times, st.lists(updates, max_size=3), stats),
    st.builds(Heartbeat, times),
    st.builds(RequestRefused, texts, texts, st.none() | texts),
    st.builds(EngineFailure, texts, texts, texts),
)


def decoder_of(kind: Any) -> Callable[[bytes], Any]:
    return msgspec.msgpack.Decoder(kind).decode


@given(to_engine)
def test_every_message_to_the_engine_comes_back_equal(message: ToEngine) -> None:
    assert decoder_of(ToEngine)(msgspec.msgpack.encode(message)) == message


@given(from_engine)
def test_every_message_from_the_engine_comes_back_equal(message: FromEngine) -> None:
    assert decoder_of(FromEngine)(msgspec.msgpack.encode(message)) == message


bad_params = msgspec.msgpack.encode(
    {"type": "AddRequest", "request_id": "a", "prompt_token_ids": [1], "params": {"temperature": -1}, "arrival_s": 0.0}
)
bad_config = msgspec.msgpack.encode({"type": "Start", "config": {"model": "m", "block_size": 0}, "log_level": 20})
wrong = st.sampled_from([b"", b"\x80", bad_params, bad_config, msgspec.msgpack.encode({"type": "Unknown"})])


def framed(data: bytes, number: int = 0) -> bytes:
    """As it goes over the wire."""
    return number.to_bytes(8) + len(data).to_bytes(8) + data


def numbered(*messages: FromEngine, first: int = 0) -> bytes:
    return b"".join(framed(msgspec.msgpack.encode(message), n) for n, message in enumerate(messages, first))


misnumbered = st.builds(lambda data: b"\1" + data, st.binary(min_size=15, max_size=40))
broken = st.builds(framed, wrong) | misnumbered


@contextmanager
def engine_link() -> Generator[tuple[EngineLink, socket.socket], None, None]:
    """With what the server writes into."""
    server_end, engine_end = socket.socketpair()
    link = EngineLink(engine_end.detach())
    with server_end:
        yield link, server_end
    link.close()


@contextmanager
def linked(
    on_message: Callable[[FromEngine], None],
    on_broken: Callable[[BrokenLinkError], None] = pytest.fail,
) -> Generator[tuple[ServerLink, EngineLink], None, None]:
    """Both ends, on the running loop."""
    server = ServerLink(on_message, on_broken)
    engine = EngineLink(server.engine_end.detach())
    yield server, engine
    engine.close()
    server.close()


def on_both_loops(check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """asyncio's own and the one that uvicorn takes where it is installed."""
    asyncio.run(asyncio.wait_for(check(), 30))
    uvloop.run(asyncio.wait_for(check(), 30))


@settings(max_examples=15, deadline=None)
@given(broken)
def test_a_broken_message_to_the_engine_ends_the_connection(frame: bytes) -> None:
    with engine_link() as (link, server_end):
        server_end.sendall(frame)
        with pytest.raises(BrokenLinkError):
            link.receive(10.0)


def frames_seen_by_the_server(data: bytes, num_seen: int) -> list[FromEngine | BrokenLinkError]:
    async def check() -> list[FromEngine | BrokenLinkError]:
        seen: asyncio.Queue[FromEngine | BrokenLinkError] = asyncio.Queue()
        link = ServerLink(seen.put_nowait, seen.put_nowait)
        link.engine_end.sendall(data)
        try:
            return [await asyncio.wait_for(seen.get(), 10) for _ in range(num_seen)]
        except TimeoutError:
            raise AssertionError("some frames led to nothing") from None
        finally:
            link.close()

    return asyncio.run(check())


@settings(max_examples=15, deadline=None)
@given(st.builds(framed, wrong, st.just(1)) | misnumbered, from_engine)
def test_a_broken_message_from_the_engine_is_told_after_those_before_it(frame: bytes, message: FromEngine) -> None:
    before, error = frames_seen_by_the_server(numbered(message) + frame, 2)
    assert before == message and isinstance(error, BrokenLinkError)


@pytest.mark.parametrize("next_number", [0, 2])
def test_a_message_that_is_lost_or_comes_twice_is_noticed(next_number: int) -> None:
    frames = numbered(Heartbeat(0.0)) + numbered(Heartbeat(1.0), first=next_number)
    assert isinstance(frames_seen_by_the_server(frames, 2)[-1], BrokenLinkError)


def test_after_a_broken_message_nothing_is_passed_on() -> None:
    async def check() -> None:
        seen: list[FromEngine | BrokenLinkError] = []
        link = ServerLink(seen.append, seen.append)
        link.engine_end.sendall(numbered(Heartbeat(1.0), first=1) + numbered(Heartbeat(0.0)))
        link.receive()
        link.receive()
        assert [type(each) for each in seen] == [BrokenLinkError]

    asyncio.run(check())


def test_a_handler_that_closes_the_link_hears_nothing_more() -> None:
    async def check() -> None:
        seen: list[FromEngine] = []

        def handle(message: FromEngine) -> None:
            seen.append(message)
            link.close()

        link = ServerLink(handle, pytest.fail)
        link.engine_end.sendall(numbered(Heartbeat(0.0), Heartbeat(1.0)))
        link.receive()
        assert seen == [Heartbeat(0.0)]

    asyncio.run(check())


def test_a_handler_that_raises_does_not_stop_the_stream() -> None:
    async def check() -> None:
        times: asyncio.Queue[float] = asyncio.Queue()

        def handle(message: FromEngine) -> None:
            assert isinstance(message, Heartbeat) and message.time_s > 0
            times.put_nowait(message.time_s)

        with linked(handle) as (_, engine):
            for time_s in (0.0, 1.0):
                engine.send(Heartbeat(time_s))
            assert await times.get() == 1.0

    on_both_loops(check)


@pytest.mark.parametrize("num_bytes", [1, 15, 16, 17, 40])
def test_messages_that_come_in_pieces_arrive_whole(num_bytes: int) -> None:
    messages = [Heartbeat(1.0), EngineFailure("a", "b"), Heartbeat(2.0)]
    data = numbered(*messages)

    async def check() -> None:
        seen: list[FromEngine] = []
        link = ServerLink(seen.append, pytest.fail)
        for start in range(0, len(data), num_bytes):
            link.engine_end.sendall(data[start : start + num_bytes])
            link.receive()
        assert seen == messages
        link.close()

    asyncio.run(check())
    with engine_link() as (link, server_end):
        got: list[ToEngine] = []
        data_to_engine = framed(msgspec.msgpack.encode(Shutdown()))
        for start in range(0, len(data_to_engine), num_bytes):
            server_end.sendall(data_to_engine[start : start + num_bytes])
            got += link.receive(0.0)
        assert got == [Shutdown()]


def test_thousands_of_messages_both_ways_keep_their_order() -> None:
    """More than the kernel holds: the rest waits in the server, and the engine waits for the server."""

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


def test_what_the_engine_said_before_its_end_is_heard_after_it() -> None:
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
    """The end of a socket can be read for ever."""

    async def check() -> None:
        with linked(pytest.fail) as (server, engine):
            engine.close()
            await until(lambda: not is_watched(server))
            server.receive()
            server.send(Shutdown())
            assert not is_watched(server) and not is_watched(server, for_room=True)

    asyncio.run(asyncio.wait_for(check(), 30))


def test_a_server_with_nothing_left_to_send_sleeps() -> None:
    async def check() -> None:
        with linked(pytest.fail) as (server, engine):
            server.send(AbortRequests(["x" * 10**6]))
            assert is_watched(server, for_room=True)
            while not engine.receive(0.0):
                await asyncio.sleep(0)
            await until(lambda: not is_watched(server, for_room=True))

    asyncio.run(asyncio.wait_for(check(), 30))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def is_watched(link: ServerLink, for_room: bool = False) -> bool:
    """Whether asyncio's loop waits for the engine's messages, or for room for the server's."""
    loop = asyncio.get_running_loop()
    key = loop._selector.get_map().get(link._socket.fileno())  # type: ignore[attr-defined]
    return key is not None and key.data[for_room] is not None


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


def test_the_engine_hears_what_the_server_said_before_its_end() -> None:
    with engine_link() as (link, server_end):
        link.send(Heartbeat(0.0))
        server_end.sendall(framed(msgspec.msgpack.encode(Shutdown())))
        server_end.close()  # with something unread: a reset
        assert link.receive(60.0) == [Shutdown()]
        with pytest.raises(ServerGoneError):
            link.receive(60.0)


def test_the_engine_is_told_at_once_of_all_that_has_arrived() -> None:
    messages = [AbortRequests(["x" * (_READ_BYTES // 2)]) for _ in range(5)]
    with engine_link() as (link, server_end):
        server_end.sendall(b"".join(framed(msgspec.msgpack.encode(each), n) for n, each in enumerate(messages)))
        assert link.receive(0.0) == messages


def test_a_last_message_that_fills_a_whole_read_is_heard() -> None:
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
