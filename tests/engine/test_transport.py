"""Messages over the wire: what is sent arrives equal; what is lost or is no message ends the connection."""

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
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
from engine.transport import BrokenLinkError, EngineLink, ServerGoneError, ServerLink
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
firsts = st.builds(FirstTokenInfo, st.none() | times, numbers, numbers, st.none() | st.lists(logprobs, max_size=2))
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


number = st.sampled_from([b"", b"\0" * 8, b"\0" * 7 + b"\1"])
broken = st.builds(bytes.__add__, number, st.binary(max_size=40) | wrong)


@settings(max_examples=15, deadline=None)
@given(broken)
def test_a_broken_message_to_the_engine_ends_the_connection(frame: bytes) -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket, tempfile.TemporaryDirectory() as folder:
        link = EngineLink(f"ipc://{folder}/s")
        socket.connect(f"ipc://{folder}/s")
        socket.send(frame)
        with pytest.raises(BrokenLinkError):
            link.receive(10.0)
        link.close()
        os.makedirs(folder, exist_ok=True)


def frames_seen_by_the_server(frames: list[bytes]) -> list[FromEngine | BrokenLinkError]:
    async def check() -> list[FromEngine | BrokenLinkError]:
        seen: asyncio.Queue[FromEngine | BrokenLinkError] = asyncio.Queue()
        link = ServerLink(seen.put_nowait, seen.put_nowait)
        with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
            socket.bind(link.address)
            for frame in frames:
                socket.send(frame)
            try:
                return [await asyncio.wait_for(seen.get(), 10) for _ in frames]
            except TimeoutError:
                raise AssertionError("some frames led to nothing") from None
            finally:
                link.close()

    return asyncio.run(check())


def numbered(*messages: FromEngine, first: int = 0) -> list[bytes]:
    return [n.to_bytes(8) + msgspec.msgpack.encode(message) for n, message in enumerate(messages, first)]


@settings(max_examples=15, deadline=None)
@given(broken, from_engine)
def test_a_broken_message_from_the_engine_is_told_after_those_before_it(frame: bytes, message: FromEngine) -> None:
    before, error = frames_seen_by_the_server([*numbered(message), b"\1" + frame])
    assert before == message and isinstance(error, BrokenLinkError)


@pytest.mark.parametrize("next_number", [0, 2])
def test_a_message_that_is_lost_or_comes_twice_is_noticed(next_number: int) -> None:
    frames = numbered(Heartbeat(0.0)) + numbered(Heartbeat(1.0), first=next_number)
    assert isinstance(frames_seen_by_the_server(frames)[-1], BrokenLinkError)


async def connected(server: ServerLink, engine: EngineLink) -> None:
    server.send(Shutdown())
    assert await asyncio.to_thread(engine.receive, 10.0) == [Shutdown()]


def test_a_handler_that_raises_does_not_stop_the_stream() -> None:
    async def check() -> None:
        times: asyncio.Queue[float] = asyncio.Queue()

        def handle(message: FromEngine) -> None:
            assert isinstance(message, Heartbeat) and message.time_s > 0
            times.put_nowait(message.time_s)

        server = ServerLink(handle, pytest.fail)
        engine = EngineLink(server.address)
        await connected(server, engine)
        for time_s in (0.0, 1.0):
            engine.send(Heartbeat(time_s))
        assert await asyncio.wait_for(times.get(), 10) == 1.0
        engine.close()
        server.close()

    asyncio.run(check())


def test_thousands_of_messages_both_ways_keep_their_order() -> None:
    """Sending and receiving at once must lose no wake-up of the event loop."""

    async def check() -> None:
        received: list[float] = []
        server = ServerLink(lambda message: received.append(getattr(message, "time_s", -1.0)), pytest.fail)
        engine = EngineLink(server.address)
        await connected(server, engine)
        for number in range(2000):
            engine.send(Heartbeat(float(number)))
            server.send(AbortRequests([str(number)]))
            if number % 50 == 0:
                await asyncio.sleep(0)
        got: list[ToEngine] = []
        while len(received) < 2000 or len(got) < 2000:
            got += engine.receive(0.0)
            await asyncio.sleep(0.001)
        assert received == [float(number) for number in range(2000)]
        assert got == [AbortRequests([str(number)]) for number in range(2000)]
        engine.close()
        server.close()

    asyncio.run(asyncio.wait_for(check(), 30))


def test_the_socket_is_private_and_goes_with_the_link() -> None:
    async def check() -> None:
        link = ServerLink(lambda message: None, pytest.fail)
        directory = Path(link.address.removeprefix("ipc://")).parent
        assert directory.stat().st_mode & 0o077 == 0
        link.close()
        link.close()
        link.send(Shutdown())
        assert not directory.exists()

    asyncio.run(check())


def test_the_engine_notices_that_the_server_is_gone(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    link = EngineLink(f"ipc://{tmp_path}/s", parent_fd=read_fd)
    assert link.receive(0.0) == []
    os.close(write_fd)
    link.send(Heartbeat(0.0))
    with pytest.raises(ServerGoneError):
        link.receive(60.0)
    os.close(read_fd)
    link.close()
