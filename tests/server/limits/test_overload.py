"""Responses of an overloaded server, and to requests whose own time limits pass."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest

from engine.core.errors import OverloadedError, RequestTimeoutError
from engine.core.generation_request import GenerationRequest
from engine.core.outputs import RequestOutput
from engine.core.request import FinishReason
from server.auth.api_keys import NOBODY
from server.generation.entry import Arrival
from server.protocol.request import RequestFields
from tests.server.byte_tokenizer import ByteTokenizer
from tests.server.events import chunks_of, error_of
from tests.server.fake_engine import FakeEngine
from tests.server.late_engine import LateEngine, outputs_of
from tests.server.live_server import FakeBackend, LiveServer, live_server


class TestDoor:
    @pytest.mark.parametrize("path", ["completions", "chat/completions", "embeddings"])
    def test_a_full_server_refuses_before_it_reads_the_body(self, server: LiveServer, path: str) -> None:
        server.engine.is_full = True
        response = server.post(f"/v1/{path}", b"{" * 100_000)
        assert (response.status_code, error_of(response)["code"]) == (429, "slow_down")
        assert response.headers["retry-after"] == "3"

    def test_the_connection_can_be_used_again(self, server: LiveServer) -> None:
        server.engine.is_full = True
        assert server.post("/v1/completions", b"x" * 3_000_000).status_code == 429
        server.engine.is_full = False
        assert server.complete("Hi").status_code == 200

    def test_only_generation_is_refused(self, server: LiveServer) -> None:
        server.engine.is_full = True
        assert server.post("/tokenize", b'{"prompt": "Hi"}').status_code == 200
        assert server.client.get("/v1/models").status_code == 200
        assert server.post("/v1/chat/completions/render", b"{}").status_code == 400


class TestPatience:
    def test_it_reaches_the_engine_in_seconds(self, server: LiveServer) -> None:
        server.complete("Hi", max_queue_ms=1500, deadline_ms=2000)
        server.complete("Hi")
        limits = [(request.max_queue_s, request.deadline_s) for request in server.engine.requests]
        assert limits == [(1.5, 2.0), (None, None)]

    @pytest.mark.parametrize("name", ["max_queue_ms", "deadline_ms"])
    @pytest.mark.parametrize("value", [0, -1, 1.5, "100", 2**31])
    def test_values_that_make_no_sense_are_refused_by_name(self, server: LiveServer, name: str, value: object) -> None:
        response = server.complete("Hi", **{name: value})
        assert (response.status_code, error_of(response)["param"]) == (400, name)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "slow", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "slow"}]}),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "slow"}]}),
        ("/v1/responses", {"input": "slow"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "slow"}], "max_tokens": 1}),
        ("/v1/embeddings", {"input": "slow"}),
    ],
)
def test_a_deadline_passes_while_the_request_is_read(
    server: LiveServer, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = ByteTokenizer.encode

    def encode_slowly(self: ByteTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        time.sleep(0.5 if "slow" in text else 0.0)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(ByteTokenizer, "encode", encode_slowly)
    late = server.post(path, json.dumps({**body, "deadline_ms": 100}).encode())
    assert late.status_code == (504 if path == "/v1/messages" else 408) and "deadline" in late.text
    assert late.headers["x-should-retry"] == "false"
    assert server.engine.requests == []
    assert server.post(path, json.dumps({**body, "deadline_ms": 60_000}).encode()).status_code == 200


class TestSiblings:
    """Several sequences of one request are admitted together."""

    def test_those_after_the_first_come_with_it(self, server: LiveServer) -> None:
        server.complete(["a", "b"], n=2)
        assert [request.is_sibling for request in server.engine.requests] == [False, True, True, True]

    def test_if_the_first_is_refused_no_other_is_asked_for(self) -> None:
        engine = FullEngine()
        with pytest.raises(OverloadedError):
            outputs_of(engine)
        assert engine.asked == [False]

    @pytest.mark.parametrize(
        ("sequences", "param"), [({"prompt": [1] * 25, "n": 4}, "n"), ({"prompt": [[1] * 30, [1] * 70]}, "prompt")]
    )
    def test_more_prompt_tokens_than_may_ever_wait_are_refused(self, sequences: dict[str, Any], param: str) -> None:
        with live_server(max_waiting_tokens=100) as server:
            assert server.complete(**sequences, max_tokens=1).status_code == 200
        with live_server(max_waiting_tokens=99) as server:
            refused = server.complete(**sequences, max_tokens=1)
            assert (refused.status_code, error_of(refused)["param"]) == (400, param)
            assert "have 100 prompt tokens together, more than the 99 that may wait here" in refused.text
            assert server.complete([1] * 200, max_tokens=1).status_code == 200


class FullEngine(FakeEngine):
    """Refuses every request, and remembers whether a sibling was asked for before."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bool] = []

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        self.asked.append(request.is_sibling)
        raise OverloadedError("Full.", 1.0)
        yield


def test_a_deadline_counts_from_the_arrival() -> None:
    fields = RequestFields(deadline_ms=5000)
    old, new = (Arrival("m", "r", time.monotonic() - age_s, "", NOBODY, 1.0, "", fields) for age_s in (6.0, 0.0))
    asyncio.run(new.within_deadline(asyncio.sleep(0.01)))
    with pytest.raises(RequestTimeoutError):
        asyncio.run(old.within_deadline(asyncio.sleep(0.01)))


class LateFirstEngine(LateEngine):
    late_is_sibling = False


def test_a_sequence_without_a_token_at_its_deadline_ends_as_its_siblings_do() -> None:
    outputs = outputs_of(LateEngine(hold_at=1))
    assert [output.num_output_tokens for index, output in outputs if index == 0] == [1, 2, 3]
    (late,) = [output for index, output in outputs if index == 1]
    assert (late.finish_reason, late.stop_reason, late.token_ids) == (FinishReason.LENGTH, "deadline", ())


def test_a_sequence_that_asks_for_no_token_has_nothing_to_end_with() -> None:
    with pytest.raises(RequestTimeoutError):
        outputs_of(LateEngine(hold_at=1), last_max_tokens=0)


def test_before_any_token_the_whole_request_is_late() -> None:
    with pytest.raises(RequestTimeoutError):
        outputs_of(LateEngine(hold_at=0))


@pytest.mark.parametrize("deadline_s", [None, 1e9])
def test_a_sequence_that_only_waited_too_long_is_an_error(deadline_s: float | None) -> None:
    with pytest.raises(RequestTimeoutError):
        outputs_of(LateEngine(hold_at=1), deadline_s=deadline_s)


@pytest.fixture
def late() -> Generator[LiveServer, None, None]:
    with live_server(FakeBackend(LateEngine(hold_at=1))) as running:
        yield running


def test_the_limit_of_the_queue_is_a_timeout(late: LiveServer) -> None:
    for patience in ({}, {"max_queue_ms": 60_000, "deadline_ms": 60_000}):
        refused = late.complete("Hi", n=2, **patience)
        assert refused.status_code == 408 and "x-should-retry" not in refused.headers
        late.engine.hold_at, late.engine.num_holding = 1, 0
    assert chunks_of(late.complete("Hi", n=2, stream=True))[-1]["error"]["code"] == "request_timeout"


def test_a_choice_without_a_token_has_no_scores_of_its_prompt(late: LiveServer) -> None:
    parameters = {"deadline_ms": 300, "max_tokens": 2, "n": 2, "prompt_logprobs": 1}
    scored, bare = late.complete("Hi", echo=True, logprobs=1, **parameters).json()["choices"]
    assert len(scored["logprobs"]["tokens"]) == 5
    assert [bare["logprobs"][name] for name in ("tokens", "token_logprobs", "top_logprobs")] == [
        ["<s>", "H", "i"],
        [None] * 3,
        [None] * 3,
    ]
    assert bare["prompt_logprobs"] == [None] * 3 and bare["stop_reason"] == "deadline"


def test_a_prompts_scores_are_returned_if_any_choice_has_them() -> None:
    with live_server(FakeBackend(LateFirstEngine(hold_at=1))) as running:
        body = running.chat(deadline_ms=300, n=2, max_tokens=2, prompt_logprobs=1).json()
    assert body["choices"][0]["stop_reason"] == "deadline"
    assert body["prompt_logprobs"][1] is not None
