"""Messages over the wire: what is sent arrives equal; what is lost or is no message ends the connection."""

import asyncio
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.batch import Phase, TokenLogprobs
from engine.core.cache_steering import CachedPrefixes, CacheSteering
from engine.core.config import EngineConfig
from engine.core.generation_request import GenerationRequest
from engine.core.messages import (
    AbortRequests,
    AdapterLoaded,
    AddRequest,
    DropPrefixes,
    EngineFailure,
    EngineReady,
    FindPrefix,
    FirstTokenInfo,
    FromEngine,
    Heartbeat,
    Inspect,
    Inspection,
    LoadAdapter,
    MarkStalled,
    PrefixFound,
    RequestRefused,
    RequestsScheduled,
    RequestState,
    RequestUpdate,
    ResetPrefixCache,
    Shutdown,
    Start,
    StepUpdate,
    ToEngine,
    UnloadAdapter,
)
from engine.core.request import FinishReason
from engine.core.sampling_params import SamplingParams
from engine.core.stats import PoolStats, StepStats
from engine.process.transport import BrokenLinkError, ServerLink
from tests.engine import fake_engine_process as fake
from tests.engine.process.links import engine_link, framed, linked, on_both_loops

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
logprobs = st.builds(TokenLogprobs, numbers, times, numbers, ids.map(tuple), st.lists(times, max_size=5).map(tuple))
firsts = st.builds(
    FirstTokenInfo, st.none() | times, numbers, numbers, st.none() | st.lists(st.binary(max_size=9), max_size=2)
)
updates = st.builds(
    RequestUpdate,
    texts,
    ids.map(tuple),
    st.lists(logprobs, max_size=2).map(tuple),
    st.none() | firsts,
    st.none() | st.sampled_from(FinishReason),
    st.none() | numbers,
    numbers,
    st.binary(max_size=4),
    numbers,
    st.none() | texts,
)
stats = st.builds(
    StepStats,
    st.none() | st.sampled_from(Phase),
    *(numbers, numbers, times, times, numbers, numbers),
    st.builds(PoolStats, numbers, numbers, numbers),
    *(numbers, numbers, numbers),
)
states = st.builds(RequestState, texts, st.booleans(), st.none() | numbers, numbers, numbers, numbers)
steering = st.builds(CacheSteering, texts, times, st.booleans())
cached = st.builds(CachedPrefixes, texts, *[numbers] * 4, times, times)
asked = st.builds(
    GenerationRequest,
    prompt_token_ids=ids,
    params=params,
    arrival_s=times,
    steering=steering,
    given_token_ids=ids.map(tuple),
    deadline_s=st.none() | times,
    trace_headers=st.dictionaries(texts, texts, max_size=2),
)
to_engine: dict[type, st.SearchStrategy[ToEngine]] = {
    Start: st.builds(Start, configs, numbers),
    AddRequest: st.builds(AddRequest, request_id=texts, asked=asked, output_token_ids=ids),
    AbortRequests: st.builds(AbortRequests, st.lists(texts, max_size=3)),
    MarkStalled: st.builds(MarkStalled, texts, st.booleans()),
    Inspect: st.builds(Inspect, st.lists(texts, max_size=3), st.lists(texts, max_size=3)),
    ResetPrefixCache: st.builds(ResetPrefixCache, st.booleans()),
    DropPrefixes: st.builds(DropPrefixes, texts, st.none() | texts),
    LoadAdapter: st.builds(LoadAdapter, texts),
    UnloadAdapter: st.builds(UnloadAdapter, texts),
    FindPrefix: st.builds(FindPrefix, numbers, ids, texts, texts),
    Shutdown: st.just(Shutdown()),
}
from_engine: dict[type, st.SearchStrategy[FromEngine]] = {
    EngineReady: st.builds(EngineReady, configs.map(fake.info_of)),
    RequestsScheduled: st.builds(RequestsScheduled, st.lists(texts, max_size=3)),
    StepUpdate: st.builds(StepUpdate, times, st.lists(updates, max_size=3), stats),
    Heartbeat: st.builds(Heartbeat, times),
    RequestRefused: st.builds(RequestRefused, texts, texts, st.none() | texts),
    AdapterLoaded: st.builds(AdapterLoaded, texts, st.none(), texts),
    Inspection: st.builds(
        Inspection, st.lists(states, max_size=2), st.dictionaries(texts, st.lists(cached, max_size=2), max_size=2)
    ),
    PrefixFound: st.builds(PrefixFound, numbers, numbers, numbers),
    EngineFailure: st.builds(EngineFailure, texts, texts, texts),
}


def test_no_kind_of_message_is_left_out() -> None:
    assert to_engine.keys() == {*get_args(ToEngine)} and from_engine.keys() == {*get_args(FromEngine)}


def decoder_of(kind: Any) -> Callable[[bytes], Any]:
    return msgspec.msgpack.Decoder(kind).decode


@given(st.one_of(*to_engine.values()))
def test_every_message_to_the_engine_comes_back_equal(message: ToEngine) -> None:
    assert decoder_of(ToEngine)(msgspec.msgpack.encode(message)) == message


@given(st.one_of(*from_engine.values()))
def test_every_message_from_the_engine_comes_back_equal(message: FromEngine) -> None:
    assert decoder_of(FromEngine)(msgspec.msgpack.encode(message)) == message


bad_asked = {"prompt_token_ids": [1], "params": {"temperature": -1}, "arrival_s": 0.0}
bad_params = msgspec.msgpack.encode({"type": "AddRequest", "request_id": "a", "asked": bad_asked})
bad_config = msgspec.msgpack.encode({"type": "Start", "config": {"model": "m", "block_size": 0}, "log_level": 20})
wrong = st.sampled_from([b"", b"\x80", bad_params, bad_config, msgspec.msgpack.encode({"type": "Unknown"})])


def numbered(*messages: FromEngine, first: int = 0) -> bytes:
    return b"".join(framed(msgspec.msgpack.encode(message), n) for n, message in enumerate(messages, first))


misnumbered = st.builds(lambda data: b"\1" + data, st.binary(min_size=15, max_size=40))
broken = st.builds(framed, wrong) | misnumbered


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
@given(st.builds(framed, wrong, st.just(1)) | misnumbered, st.one_of(*from_engine.values()))
def test_a_broken_message_from_the_engine_is_reported_after_those_before_it(frame: bytes, message: FromEngine) -> None:
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


def test_a_handler_that_closes_the_link_receives_nothing_more() -> None:
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


def test_a_handler_that_raises_breaks_the_link() -> None:
    """Some tokens of its message may not have arrived: nothing may follow them as if they had."""

    async def check() -> None:
        handled: list[FromEngine] = []
        broken: asyncio.Queue[BrokenLinkError] = asyncio.Queue()

        def handle(message: FromEngine) -> None:
            handled.append(message)
            raise ValueError("no such counter")

        with linked(handle, broken.put_nowait) as (_, engine):
            for time_s in (0.0, 1.0):
                engine.send(Heartbeat(time_s))
            assert "ValueError('no such counter')" in str(await broken.get())
            assert handled == [Heartbeat(0.0)]

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
