import asyncio
from typing import Any

import pytest

from loadtest.client import StreamingClient
from loadtest.collector import StreamCollector
from loadtest.endpoints import Endpoint, WireOptions
from loadtest.reader import ResponseReader
from loadtest.record import Outcome, Record, Usage
from loadtest.target import parse_target, resolve
from loadtest.workload import RequestSpec
from tests.loadtest.fake_server import FakeServer, running

SPEC = RequestSpec("all", [1, 2, 3], 6)


def sent(fake: FakeServer, options: WireOptions | None = None, spec: RequestSpec = SPEC, **more: Any) -> Record:
    async def send() -> Record:
        target = await resolve(parse_target("A", fake.url))
        return await StreamingClient(target, options or WireOptions(model="m"))(spec, **more)

    with running(fake):
        return asyncio.run(send())


@pytest.mark.parametrize(
    "fake",
    [
        FakeServer(),
        FakeServer(newline="\r\n"),
        FakeServer(newline="\r"),
        FakeServer(prefix=": ping\n\n"),
        FakeServer(prefix="event: message\nid: 1\n"),
        FakeServer(gap_s=0.002),
        FakeServer(ends_with_empty_chunk=True),
        FakeServer(sends_timings=False, sends_metrics=False),
    ],
)
def test_an_answer_has_the_tokens_of_usage_and_one_arrival_per_chunk(fake: FakeServer) -> None:
    reply = sent(fake).reply
    assert (reply.outcome, reply.message, reply.status) == (Outcome.OK, "", 200)
    assert reply.usage == Usage(3, 6)
    assert len(reply.arrivals_s) == 6


@pytest.mark.parametrize(("tokens_per_chunk", "num_chunks"), [(2, 3), (4, 2), (6, 1)])
def test_tokens_are_not_chunks(tokens_per_chunk: int, num_chunks: int) -> None:
    reply = sent(FakeServer(tokens_per_chunk=tokens_per_chunk)).reply
    assert reply.usage == Usage(3, 6)
    assert len(reply.arrivals_s) == num_chunks


def test_latencies_are_at_least_the_servers_delays() -> None:
    reply = sent(FakeServer(first_token_s=0.05, gap_s=0.02)).reply
    assert reply.ttft_s is not None
    assert reply.tpot_s is not None
    assert reply.e2e_s is not None
    assert reply.ttft_s >= 0.05
    assert reply.tpot_s >= 0.015
    assert reply.e2e_s >= 0.13
    assert reply.connect_s > 0
    assert reply.sent_s < reply.arrivals_s[0] <= reply.arrivals_s[-1] <= reply.ended_s


def test_the_request_asks_for_what_the_measurement_needs() -> None:
    fake = FakeServer()
    sent(fake)
    (body,) = fake.bodies
    assert body == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 6,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }


CHATS = [(Endpoint.CHAT, "/v1/chat/completions"), (Endpoint.RESPONSES, "/v1/responses")]


@pytest.mark.parametrize(("endpoint", "path"), CHATS)
@pytest.mark.parametrize("options", [{}, {"tokens_per_chunk": 2}, {"newline": "\r\n"}, {"sends_timings": False}])
def test_chats_and_responses_are_read_as_completions_are(
    endpoint: Endpoint, path: str, options: dict[str, Any]
) -> None:
    fake = FakeServer(num_cached=2, **options)
    reply = sent(fake, WireOptions("m", endpoint), RequestSpec("all", "one two three", 6)).reply
    assert (reply.outcome, reply.message, reply.usage) == (Outcome.OK, "", Usage(3, 6, 2))
    assert len(reply.arrivals_s) == 6 / fake.tokens_per_chunk
    assert reply.server_ms.get("queue_ms") == (0.25 if fake.sends_timings else None)
    assert fake.paths == [path]


def test_a_chat_and_a_response_ask_for_what_the_measurement_needs() -> None:
    fake = FakeServer()
    for endpoint, _ in CHATS:
        sent(fake, WireOptions("m", endpoint), RequestSpec("all", "hi", 6))
    said = [{"role": "user", "content": "hi"}]
    common = {"model": "m", "temperature": 0.0, "stream": True, "ignore_eos": True}
    usage = {"include_usage": True}
    assert fake.bodies == [
        {**common, "messages": said, "max_tokens": 6, "stream_options": usage},
        {**common, "input": said, "max_output_tokens": 6, "store": False},
    ]


@pytest.mark.parametrize(("endpoint", "_path"), CHATS)
def test_chats_and_responses_fail_as_completions_do(endpoint: Endpoint, _path: str) -> None:
    for fake, outcome in (
        (FakeServer(breaks_after_chunks=3), Outcome.BROKEN),
        (FakeServer(error_after_chunks=3), Outcome.STREAM_ERROR),
        (FakeServer(failing_status=400), Outcome.HTTP_ERROR),
    ):
        assert sent(fake, WireOptions("m", endpoint), RequestSpec("all", "hi", 6)).reply.outcome is outcome


def test_options_change_the_request() -> None:
    fake = FakeServer()
    headers = {"x-team": "a", "user-agent": "me"}
    extra = {"top_k": 5, "temperature": 1.5}
    options = WireOptions(
        "m", Endpoint.COMPLETIONS, "secret", headers, ignore_eos=False, include_usage=False, extra_body=extra
    )
    reply = sent(fake, options).reply
    assert "ignore_eos" not in fake.bodies[0]
    assert "stream_options" not in fake.bodies[0]
    assert (fake.bodies[0]["top_k"], fake.bodies[0]["temperature"]) == (5, 1.5)
    assert fake.headers[0]["authorization"] == "Bearer secret"
    assert (fake.headers[0]["x-team"], fake.headers[0]["user-agent"]) == ("a", "me")
    assert (reply.outcome, reply.usage) == (Outcome.OK, None)


@pytest.mark.parametrize(
    ("fake", "outcome", "why"),
    [
        (FakeServer(breaks_after_chunks=3), Outcome.BROKEN, "closed in the middle"),
        (FakeServer(breaks_after_chunks=0), Outcome.BROKEN, "closed in the middle"),
        (FakeServer(sends_done=False), Outcome.BROKEN, "without [DONE]"),
        (FakeServer(body_type="application/json"), Outcome.BROKEN, "not an event stream"),
        (FakeServer(error_after_chunks=3), Outcome.STREAM_ERROR, "the engine fell over"),
        (FakeServer(failing_status=400), Outcome.HTTP_ERROR, "no such thing"),
        (FakeServer(failing_status=503), Outcome.HTTP_ERROR, "no such thing"),
        (FakeServer(num_rejections=1), Outcome.REJECTED, "slow down"),
    ],
)
def test_every_way_to_fail_has_its_outcome(fake: FakeServer, outcome: Outcome, why: str) -> None:
    reply = sent(fake).reply
    assert reply.outcome is outcome
    assert why in reply.message
    assert reply.status == (fake.failing_status or (429 if outcome is Outcome.REJECTED else 200))


def test_a_stream_without_done_is_whole_where_none_is_expected() -> None:
    assert sent(FakeServer(sends_done=False), WireOptions("m", expects_done=False)).reply.outcome is Outcome.OK
    assert sent(FakeServer(breaks_after_chunks=3), WireOptions("m", expects_done=False)).reply.outcome is Outcome.BROKEN


def test_an_error_event_says_more_than_the_broken_end_after_it() -> None:
    async def read() -> tuple[Outcome, str]:
        reader = ResponseReader(StreamCollector())
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\n"
        reader.data_received(head + b'data: {"error": {"message": "out of memory"}}\n\n')
        reader.connection_lost(ConnectionResetError("reset"))
        return reader.verdict()

    assert asyncio.run(read()) == (Outcome.STREAM_ERROR, "out of memory")


@pytest.mark.parametrize(
    ("head", "why"),
    [("502 Bad Gateway", "status 502"), ("307 Moved\r\nLocation: http://other:1/v1/completions", "http://other:1/v1/")],
)
def test_a_status_without_a_body_is_reported_too(head: str, why: str) -> None:
    async def read() -> tuple[Outcome, str]:
        reader = ResponseReader(StreamCollector())
        reader.data_received(f"HTTP/1.1 {head}\r\nContent-Length: 0\r\n\r\n".encode())
        return reader.verdict()

    outcome, message = asyncio.run(read())
    assert outcome is Outcome.HTTP_ERROR
    assert why in message


def test_a_request_that_takes_too_long_is_cut() -> None:
    fake = FakeServer(gap_s=60)
    reply = sent(fake, WireOptions(timeout_s=0.5)).reply
    assert reply.outcome is Outcome.TIMEOUT
    assert len(reply.arrivals_s) == 1
    assert fake.num_in_flight == 0


def test_a_server_that_is_gone_is_a_connect_error() -> None:
    async def send() -> Record:
        with running(FakeServer()) as fake:
            target = await resolve(parse_target("A", fake.url))
        return await StreamingClient(target, WireOptions())(SPEC)

    reply = asyncio.run(send()).reply
    assert (reply.outcome, reply.message) == (Outcome.CONNECT_ERROR, "connection refused")


def test_after_a_429_the_request_waits_and_is_sent_again_with_retry_429() -> None:
    fake = FakeServer(num_rejections=2, retry_after_s=0.05)
    record = sent(fake, WireOptions(retry_429=True))
    assert (record.reply.outcome, record.num_retries, len(fake.bodies)) == (Outcome.OK, 2, 3)
    assert record.retry_wait_s >= 0.1


def test_retries_end_with_the_time_limit() -> None:
    fake = FakeServer(num_rejections=1000, retry_after_s=60.1)
    record = sent(fake, WireOptions(retry_429=True, timeout_s=60))
    assert record.reply.outcome is Outcome.REJECTED
    assert record.num_retries == 0


def test_the_time_limit_is_of_all_attempts_together() -> None:
    fake = FakeServer(num_rejections=1, retry_after_s=1.5, gap_s=60)
    record = sent(fake, WireOptions(retry_429=True, timeout_s=2.0))
    assert record.reply.outcome is Outcome.TIMEOUT
    assert record.reply.ended_s - record.reply.sent_s < 2.0  # what a limit of its own would take at least


def test_the_latencies_of_a_retried_request_are_those_of_its_last_attempt() -> None:
    record = sent(FakeServer(num_rejections=1, retry_after_s=0.2), WireOptions(retry_429=True))
    assert record.reply.sent_s - record.began_s >= 0.2
    assert record.retry_wait_s >= 0.2


def test_the_send_lag_is_known_only_where_the_request_was_due() -> None:
    assert sent(FakeServer()).send_lag_s is None
    lag_s = sent(FakeServer(), due_s=-1.0).send_lag_s
    assert lag_s is not None
    assert lag_s > 1.0


def test_the_servers_timings_come_from_headers_and_stream() -> None:
    reported = sent(FakeServer(claimed_ttft_ms=0.25, gap_s=0.001)).reply.server_ms
    assert reported == {"ttft_ms": 0.25, "itl_ms": 1.0, "queue_ms": 0.25, "generated_tokens": 6.0}
