"""/v1/embeddings: shapes, order, limits, refusals, and the OpenAI client."""

import asyncio
import base64
import json
import struct
import tracemalloc
from contextlib import closing
from typing import Any

import httpx
import pytest
from openai import OpenAI

from engine.core.outputs import RequestOutput
from engine.core.request import FinishReason
from engine.core.stats import RequestTimings
from server.generation import whole_answer
from server.generation.embeddings import GROUP, GROUP_TOKENS, answer_bytes, body
from server.generation.whole_answer import answer_of
from server.protocol.embeddings import EmbeddingRequest, EmbeddingResponse
from tests.server import fake_engine
from tests.server.events import error_of
from tests.server.live_server import LiveServer, live_server


def embed(server: LiveServer, **fields: Any) -> httpx.Response:
    return server.client.post("/v1/embeddings", json=fields)


def vectors(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    EmbeddingResponse.model_validate(response.json())
    assert [entry["index"] for entry in response.json()["data"]] == list(range(len(response.json()["data"])))
    return [entry["embedding"] for entry in response.json()["data"]]


def refused(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400
    return error_of(response)


def expected(token_ids: list[int]) -> list[float]:
    return [len(token_ids), sum(token_ids) / 4, token_ids[-1]]


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        ("ab", [[256, 97, 98]]),
        (["a", "bc"], [[256, 97], [256, 98, 99]]),
        ([5, 6], [[5, 6]]),
        ([[5], [7, 8]], [[5], [7, 8]]),
    ],
)
def test_every_form_of_input_gets_its_vectors_in_order(server: LiveServer, value: Any, ids: list[list[int]]) -> None:
    assert vectors(embed(server, input=value)) == [expected(each) for each in ids]
    assert all(each.params.max_tokens == 0 and each.params.returns_embedding for each in server.engine.requests)


def test_as_many_inputs_as_openai_takes_are_one_request(server: LiveServer) -> None:
    most = [[5]] * 2048
    assert len(vectors(embed(server, input=most))) == 2048
    assert "more than 2048 items" in refused(embed(server, input=[*most, [5]]))["message"]


def test_base64_holds_the_same_numbers(server: LiveServer) -> None:
    [text] = vectors(embed(server, input=[5, 6], encoding_format="base64"))
    assert base64.b64decode(text) == b"\0\0\0\x40" + b"\0\0\x30\x40" + b"\0\0\xc0\x40"  # 2, 2.75, 6


def test_more_inputs_than_fit_at_once_go_in_groups() -> None:
    with live_server(max_num_seqs=8, max_waiting=GROUP) as server:
        server.engine.delay_s = 0.001
        count = 3 * GROUP + 1
        assert vectors(embed(server, input=[[1, index] for index in range(count)])) == [
            expected([1, index]) for index in range(count)
        ]
        assert server.engine.max_live_seen == GROUP


def test_long_inputs_go_few_at_a_time(server: LiveServer) -> None:
    server.engine.delay_s = 0.001
    long = [1] * 512
    assert len(vectors(embed(server, input=[long] * 11, truncate_prompt_tokens=512))) == 11
    assert server.engine.max_live_seen == GROUP_TOKENS // 512


def test_no_more_go_at_once_than_the_engine_takes() -> None:
    with live_server(max_num_seqs=2, max_waiting=1) as server:
        server.engine.delay_s = 0.001
        assert len(vectors(embed(server, input=["a"] * 10))) == 10
        assert server.engine.max_live_seen == 3


def test_no_more_tokens_go_at_once_than_may_wait() -> None:
    with live_server(max_waiting_tokens=20) as server:
        server.engine.delay_s = 0.001
        assert len(vectors(embed(server, input=[[1] * 10] * 5 + [[1] * 30]))) == 6
        assert server.engine.max_live_seen == 2


@pytest.mark.parametrize("form", ["float", "base64"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_vector_that_is_not_finite_is_an_error(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, form: str, number: float
) -> None:
    monkeypatch.setattr(fake_engine, "embedding", lambda request: struct.pack("<3f", 1.0, number, 3e38))
    response = embed(server, input=["a", "b"], encoding_format=form)
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")


def test_others_run_between_two_vectors() -> None:
    output = RequestOutput(
        text="",
        token_ids=(),
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_output_tokens=0,
        timings=RequestTimings(queue_s=0.0, prefill_s=0.0, inter_token_s=(), prefill_chunks=1),
    )
    request = EmbeddingRequest.model_validate({"input": "Hi"})

    async def num_turns() -> int:
        answer = answer_of(body(request, "m", [output] * 5), {}, 1.0, slice_size=1)
        telling, turns = asyncio.create_task(answer), 0
        while not telling.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(num_turns()) > 5


def test_a_large_answer_is_written_in_pieces_of_the_same_bytes(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"input": ["a", "bc"] * 20, "encoding_format": "base64"}
    whole = embed(server, **fields)
    monkeypatch.setattr(whole_answer, "WHOLE_BYTES", 100)
    pieces = embed(server, **fields)
    assert "content-length" in whole.headers and "content-length" not in pieces.headers
    [of_whole, of_pieces] = [each.content.partition(b',"timings"')[0] for each in (whole, pieces)]
    assert of_whole == of_pieces == json.dumps(whole.json() | {"timings": 0}, separators=(",", ":"))[:-13].encode()


def test_vectors_reserve_memory_until_they_are_written() -> None:
    two = answer_bytes(3, 3)  # the first is free
    with live_server(answer_memory_bytes=two) as server:
        server.engine.hold_at = 0
        with closing(server.connect()) as connection:
            connection.sendall(server.request_bytes("/v1/embeddings", {"input": ["a"] * 3}))
            server.wait_until(lambda: server.engine.num_live == 3)
            assert server.context.answer_memory.num_bytes == two
            response = embed(server, input=["a", "b"])
            assert (response.status_code, response.headers["retry-after"]) == (429, "5")
        server.wait_until_idle()
        server.engine.hold_at = None
        assert server.context.answer_memory.num_bytes == 0
        assert len(vectors(embed(server, input=["a"] * 3))) == 3
        assert "--answer-memory-bytes" in refused(embed(server, input=["a"] * 4))["message"]
    with live_server(answer_memory_bytes=1) as server:
        assert len(vectors(embed(server, input="a"))) == 1


def test_outputs_take_no_more_than_is_reserved() -> None:
    def output() -> RequestOutput:
        counts = {"num_prompt_tokens": 1000, "num_cached_tokens": 1000, "num_output_tokens": 0}
        timings = RequestTimings(queue_s=0.1 + 0.1, prefill_s=0.1 + 0.2, inter_token_s=(), prefill_chunks=1)
        return RequestOutput(text="", token_ids=(), embedding=bytes(4 * 64), timings=timings, **counts)

    tracemalloc.start()
    try:
        outputs = [output() for _ in range(101)]
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(outputs) == 101 and answer_bytes(101, 64) / 4 < taken < answer_bytes(101, 64)


def test_usage_timings_and_headers_count_the_prompts(server: LiveServer) -> None:
    server.engine.num_cached_tokens = 2
    response = embed(server, input=[[5, 6, 7], [8]])
    body = response.json()
    assert body["usage"] == {"prompt_tokens": 4, "total_tokens": 4, "prompt_tokens_details": {"cached_tokens": 4}}
    assert body["timings"]["queue_ms"] + body["timings"]["prefill_ms"] == body["timings"]["e2e_ms"]
    assert (body["timings"]["generated_tokens"], body["timings"]["prompt_tokens"]) == (0, 4)
    assert (response.headers["x-prompt-tokens"], response.headers["x-cached-tokens"]) == ("4", "4")


@pytest.mark.parametrize("fields", [{"dimensions": 3}, {"dimensions": 3.0}, {"dimensions": None}, {"normalize": True}])
def test_the_models_own_vectors_may_be_asked_for(server: LiveServer, fields: dict[str, Any]) -> None:
    assert vectors(embed(server, input=[5], **fields)) == [expected([5])]


def test_truncation_salt_and_priority_reach_the_engine(server: LiveServer) -> None:
    vectors(embed(server, input=[1, 2, 3], truncate_prompt_tokens=2, cache_salt="s", priority=-3))
    [request] = server.engine.requests
    assert (request.prompt_token_ids, request.cache_salt, request.priority) == ([2, 3], "s", -3)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": "", "add_special_tokens": False}, "input"),
        ({"input": []}, "input"),
        ({"input": [999_999]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 2}, "dimensions"),
        ({"input": "a", "dimensions": 4}, "dimensions"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    error = refused(embed(server, **fields))
    assert error["param"] == param and "prompt" not in error["message"].replace("truncate_prompt_tokens", "")


def test_an_input_longer_than_the_context_is_refused(server: LiveServer) -> None:
    error = refused(embed(server, input=["a", "a" * 600]))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert error["message"] == (
        "An input has 601 tokens; the maximum context length is 512. Shorten it, or set truncate_prompt_tokens."
    )


def test_a_client_that_leaves_ends_all_of_its_inputs(server: LiveServer) -> None:
    server.engine.hold_at = 0
    with closing(server.connect()) as connection:
        connection.sendall(server.request_bytes("/v1/embeddings", {"input": ["a", "b"]}))
        server.wait_until(lambda: server.engine.num_live == 2)
    server.wait_until_idle()
    assert server.engine.finished == [FinishReason.ABORT] * 2


def test_the_openai_client_reads_them(server: LiveServer) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="fake", input=["ab"])
    assert answer.data[0].embedding == expected([256, 97, 98])
