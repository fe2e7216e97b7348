"""A server with --role prefill takes prompts of decode servers, and nothing else."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.auth.key_files import bearer, write
from tests.server.events import error_of
from tests.server.fake_engine import INFO, FakeEngine
from tests.server.live_server import FakeBackend, LiveServer, live_server

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
BODY = {"token_ids": [5, 6, 7], "kv_fingerprint": "same"}


@pytest.fixture(scope="module")
def prefill() -> Generator[LiveServer, None, None]:
    engine = FakeEngine(info=msgspec.structs.replace(INFO, kv_fingerprint="same"))
    with live_server(FakeBackend(engine), role="prefill", kv_store="/tmp/kv") as running:
        yield running


def test_it_computes_a_prompt_for_whom_it_is_told(prefill: LiveServer) -> None:
    whose: dict[str, Any] = {"tenant": "t", "weight": 2.0, "share": 0.5, "priority": 3, "cache_salt": "t\0x"}
    limits = {"max_queue_ms": 1500, "deadline_ms": 9000}
    response = prefill.post_json("/v1/prefill", BODY | whose | limits | {"adapter": "d", "stored_tokens": 99})
    assert response.status_code == 200 and response.json()["stored_tokens"] == 0
    assert response.json()["timings"]["ttft_ms"] == 3.0 and response.headers["x-prompt-tokens"] == "3"
    request = prefill.engine.requests[-1]
    assert {name: getattr(request, name) for name in whose} == whose
    assert (request.prompt_token_ids, request.params.max_tokens, request.until_stored) == ([5, 6, 7], 0, True)
    assert (request.max_queue_s, request.deadline_s, request.adapter) == (1.5, 9.0, "d")
    assert told_of_requests(prefill)[-1]["finish"] == "length"
    assert request.num_announced_tokens == 2, "one token at least is computed"


def test_it_promises_a_first_token_as_servers_do_that_answer(prefill: LiveServer) -> None:
    assert prefill.post_json("/v1/prefill", BODY, {"x-slo-ttft-ms": "2500"}).status_code == 200
    assert prefill.engine.requests[-1].ttft_limit_s == 2.5
    prefill.wait_until_idle()
    kept = 'twostep_slo_requests_total{outcome="kept",slo="ttft"} 1.0'
    assert kept in prefill.client.get("/metrics").text
    refused = prefill.post_json("/v1/prefill", BODY, {"x-slo-ttft-ms": "soon"})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "x-slo-ttft-ms")


def told_of_requests(server: LiveServer) -> list[dict[str, Any]]:
    server.wait_until_idle()
    requests: list[dict[str, Any]] = server.client.get("/stats/timeline").json()["requests"]
    return requests


@pytest.mark.parametrize("path", GENERATING)
def test_it_refuses_all_that_clients_ask(prefill: LiveServer, path: str) -> None:
    response = prefill.post_json(path, {"prompt": "Hi"})
    assert response.status_code == 400 and "--role decode" in response.text
    assert all(request.until_stored for request in prefill.engine.requests)


def test_it_refuses_what_another_engine_could_not_use(prefill: LiveServer) -> None:
    response = prefill.post_json("/v1/prefill", BODY | {"kv_fingerprint": "other"})
    assert (response.status_code, error_of(response)["param"]) == (400, "kv_fingerprint")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", "text"),
        ("token_ids", []),
        ("token_ids", [-1]),
        ("token_ids", [10**6]),
        ("stored_tokens", -1),
        ("weight", 0),
        ("share", 2),
        ("max_queue_ms", 0),
        ("temperature", 1),
        ("cache_salt", "x" * 3000),
    ],
)
def test_it_refuses_what_no_decode_server_sends(prefill: LiveServer, field: str, value: Any) -> None:
    assert prefill.post_json("/v1/prefill", BODY | {field: value}).status_code == 400


def test_other_servers_have_no_such_route(server: LiveServer) -> None:
    assert server.post_json("/v1/prefill", BODY).status_code == 404


def test_it_asks_for_a_key_where_there_are_keys(tmp_path: Path) -> None:
    with live_server(role="prefill", kv_store="/tmp/kv", api_keys_file=write(tmp_path)) as server:
        assert server.post_json("/v1/prefill", BODY).status_code == 401
        assert server.post_json("/v1/prefill", BODY | {"kv_fingerprint": ""}, bearer("alice")).status_code == 200


def test_what_was_handed_over_is_counted(prefill: LiveServer) -> None:
    prefill.context.metrics.on_handed_over(48)
    assert "twostep_handed_over_tokens_total 48.0" in prefill.client.get("/metrics").text
