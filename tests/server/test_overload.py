"""What a client is told that comes when there is no room, or whose patience has an end."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from engine.client import GenerationRequest
from engine.errors import RequestTimeoutError
from engine.outputs import RequestOutput
from engine.request import FinishReason
from engine.sampling_params import SamplingParams
from server.fanout import generate_all
from tests.server.events import error_of
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer


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
        server.complete("Hi", max_queue_ms=1500, deadline_ms=2)
        server.complete("Hi")
        limits = [(request.max_queue_s, request.deadline_s) for request in server.engine.requests]
        assert limits == [(1.5, 0.002), (None, None)]

    @pytest.mark.parametrize("name", ["max_queue_ms", "deadline_ms"])
    @pytest.mark.parametrize("value", [0, -1, 1.5, "100", 2**31])
    def test_values_that_make_no_sense_are_refused_by_name(self, server: LiveServer, name: str, value: object) -> None:
        response = server.complete("Hi", **{name: value})
        assert (response.status_code, error_of(response)["param"]) == (400, name)


class LateEngine(FakeEngine):
    """The first sequence gets tokens; the second one's deadline passes before its first, once the first has begun."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        if request.request_id == "1":
            while self.num_holding == 0:
                await asyncio.sleep(0.001)
            self.hold_at = None
            raise RequestTimeoutError("Late.")
        async for output in super().generate(request):
            yield output


def outputs_of(engine: FakeEngine, last_max_tokens: int = 3) -> list[tuple[int, RequestOutput]]:
    async def collect() -> list[tuple[int, RequestOutput]]:
        params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=last_max_tokens)]
        requests = [
            GenerationRequest(request_id=name, prompt_token_ids=[1, 2], params=each, arrival_s=0.0)
            for name, each in zip("01", params, strict=True)
        ]
        return [output async for output in generate_all(engine, requests)]

    return asyncio.run(collect())


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
