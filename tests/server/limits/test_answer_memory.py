"""Memory for answers that are not streamed is reserved before they are generated, and given back however they end."""

import asyncio
import socket
import tracemalloc
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.batch import TokenLogprobs
from engine.core.errors import OverloadedError
from engine.core.generation_request import GenerationRequest, Tenant
from engine.core.outputs import RequestOutput
from engine.core.sampling_params import SamplingParams
from server.core.errors import BadRequestError
from server.generation import whole_answer
from server.generation.fan_out import IndexedOutput
from server.generation.outputs import collect
from server.generation.plan import GenerationPlan
from server.limits.answer_memory import AnswerMemory
from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.server.metrics.published_metrics import parse

SCORED = {"max_tokens": 10, "logprobs": 4}
SIZE = 10 * 400 + 10 * 5 * 100
TENANTS = [Tenant("a", 0.5), Tenant("b", 0.3), Tenant("c", 0.2)]


@pytest.fixture(scope="module")
def two_fit() -> Generator[LiveServer, None, None]:
    with live_server(answer_memory_bytes=2 * SIZE) as running:
        yield running


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1200)) | st.integers(0, 99), max_size=60))
def test_what_is_reserved_is_within_the_bound_and_returns_to_nothing(steps: list[tuple[int, int] | int]) -> None:
    memory, held = AnswerMemory(1000), list[tuple[int, int, ExitStack]]()
    for step in steps:
        if isinstance(step, int):
            if held:
                held.pop(step % len(held))[2].close()
            continue
        tenant, num_bytes = step
        own = sum(size for each, size, _ in held if each == tenant)
        context = ExitStack()
        try:
            context.enter_context(memory.reserved(TENANTS[tenant], num_bytes))
            held.append((tenant, num_bytes, context))
        except (OverloadedError, BadRequestError):
            assert num_bytes and own + num_bytes > 500 * TENANTS[tenant].share  # its part is kept for it
        assert memory.num_bytes == sum(size for _, size, _ in held) <= 1000
    for _, _, context in held:
        context.close()
    assert memory.num_bytes == 0 and memory._holdings == {}


def test_the_only_tenant_has_all() -> None:
    memory = AnswerMemory(1000)
    with memory.reserved(Tenant(), 1000):
        pass
    with pytest.raises(BadRequestError):
        memory.reserved(Tenant(), 1001).__enter__()


def test_a_share_that_changes_meanwhile_changes_nothing_that_is_held() -> None:
    memory = AnswerMemory(1000)
    with memory.reserved(TENANTS[0], 400), memory.reserved(replace(TENANTS[0], share=0.1), 100):
        assert memory.num_bytes == 500
    assert memory.num_bytes == 0


def holding(server: LiveServer, number: int) -> socket.socket:
    """Returns the connection of a request whose answer has its memory, and which has no token yet."""
    connection = server.connect()
    connection.sendall(server.request_bytes("/v1/completions", {"prompt": "Hi", **SCORED}))
    server.wait_until(lambda: server.engine.num_holding == number)
    return connection


def test_what_does_not_fit_is_refused_until_another_ends(two_fit: LiveServer) -> None:
    two_fit.engine.reset()
    two_fit.engine.hold_at = 0
    with holding(two_fit, 1), holding(two_fit, 2):
        gauge = parse(two_fit.client.get("/metrics").text)["twostep_answer_memory_reserved_bytes"]
        assert gauge.samples[0].value == 2 * SIZE
        refused = two_fit.complete(**SCORED)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert "--answer-memory-bytes" in refused.json()["error"]["message"]
        assert len(two_fit.engine.requests) == 2
        two_fit.engine.hold_at = None
    two_fit.wait_until(lambda: two_fit.context.answer_memory.num_bytes == 0)
    assert two_fit.complete(**SCORED).status_code == 200
    two_fit.wait_until_idle()


def test_what_never_fits_is_refused_for_good(two_fit: LiveServer) -> None:
    refused = two_fit.complete(max_tokens=30, logprobs=4)
    assert refused.status_code == 400 and f"{3 * SIZE} bytes" in refused.json()["error"]["message"]
    assert two_fit.complete(max_tokens=60, n=4).status_code == 400  # three of them count, with 128 bytes a token
    assert two_fit.complete(max_tokens=60, n=3).status_code == 200
    two_fit.wait_until_idle()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}], "stream": False}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 400}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 100, "logprobs": 5, "n": 3, "stream": True}),
    ],
)
def test_plain_answers_and_streams_need_none(path: str, body: dict[str, Any]) -> None:
    with live_server(answer_memory_bytes=1) as server:
        assert server.post_json(path, body).status_code == 200


def test_each_endpoint_with_logprobs_reserves() -> None:
    with live_server(answer_memory_bytes=1) as server:
        answers = [
            server.chat(logprobs=True, max_tokens=5),
            server.chat(n=2),
            server.respond(include=["message.output_text.logprobs"], max_output_tokens=16),
            server.complete(prompt_logprobs=0, max_tokens=1),
        ]
    assert [each.status_code for each in answers] == [400] * 4


@pytest.mark.parametrize("end", ["whole", "pieces", "leaves", "leaves in pieces", "fails", "refused"])
def test_it_is_given_back_however_a_request_ends(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    with live_server(backend, answer_memory_bytes=10**9) as server:
        memory, seen, reserved = server.context.answer_memory, list[int](), AnswerMemory.reserved

        def watched(memory: AnswerMemory, tenant: Tenant, num_bytes: int) -> AbstractContextManager[None]:
            seen.append(num_bytes)
            return reserved(memory, tenant, num_bytes)

        monkeypatch.setattr(AnswerMemory, "reserved", watched)
        body = {"prompt": "Hi", "max_tokens": 400, "logprobs": 100, "n": 2}
        if "pieces" in end:
            monkeypatch.setattr(whole_answer, "WHOLE_BYTES", 1000)
        if end == "fails":
            backend.engine.fail_at = 3
        if end == "refused":
            backend.engine.refusal = OverloadedError("All places are taken.", 1.0)
        if "leaves" in end:
            backend.engine.hold_at = 3 if end == "leaves" else None
            with server.connect() as connection:
                connection.sendall(server.request_bytes("/v1/completions", body))
                server.wait_until(lambda: bool(seen))
                if end == "leaves in pieces":
                    connection.recv(10)
        else:
            with suppress(httpx.RemoteProtocolError):
                server.post_json("/v1/completions", body)
        server.wait_until_idle()
        assert seen == [2 * 400 * (400 + 101 * 100)] and memory.num_bytes == 0


def test_it_is_held_until_the_answer_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with live_server() as server:
        memory, at_pieces = server.context.answer_memory, list[int]()
        plain = whole_answer.json_pieces

        def watched(*answer: Any) -> Any:
            for piece in plain(*answer):
                at_pieces.append(memory.num_bytes)
                yield piece

        monkeypatch.setattr(whole_answer, "json_pieces", watched)
        monkeypatch.setattr(whole_answer, "WHOLE_BYTES", 1000)
        assert server.complete(**SCORED, n=3).status_code == 200
        server.wait_until_idle()
    assert len(at_pieces) > 2 and set(at_pieces) == {3 * SIZE}


def output(number: int, num_logprobs: int | None) -> RequestOutput:
    def token_id() -> int:
        return 10_000 + number

    scores = ()
    if num_logprobs is not None:
        ids = tuple(token_id() + rank for rank in range(num_logprobs))
        logprobs = tuple(-1.5 - number - rank for rank in range(num_logprobs))
        scores = (TokenLogprobs(token_id(), -0.5 - number, 1000 + number, ids, logprobs),)
    return RequestOutput(
        text=f" {number}",
        token_ids=(token_id(),),
        logprobs=scores,
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_output_tokens=1000 + number,
    )


@pytest.mark.parametrize("num_logprobs", [None, 0, 5, 100])
def test_outputs_take_no_more_than_is_reserved(num_logprobs: int | None) -> None:
    num_tokens = 1000
    counter: Any = SimpleNamespace(num_generations=1, add=lambda *_: None)

    async def outputs() -> AsyncGenerator[IndexedOutput, None]:
        for number in range(num_tokens):
            yield 0, output(number, num_logprobs)

    async def measured() -> tuple[list[RequestOutput], int]:
        tracemalloc.start()
        try:
            [collected] = await collect(outputs(), counter)
            return collected, tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    collected, taken = asyncio.run(measured())
    assert "".join(each.text for each in collected) == "".join(f" {number}" for number in range(num_tokens))
    params = SamplingParams(max_tokens=num_tokens, logprobs=num_logprobs)
    generation = GenerationRequest(prompt_token_ids=[1], params=params, arrival_s=0.0)
    free, num_all = (1, 0) if num_logprobs is None else (0, num_tokens * (num_logprobs + 1))
    request: Any = None
    reserved = GenerationPlan(request, {}, (), [generation] * (1 + free), None, num_all).answer_bytes
    assert reserved / 4 < taken < reserved
