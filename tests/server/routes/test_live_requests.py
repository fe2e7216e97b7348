"""/v1/requests: live requests are listed, and aborted by id, for their own API key alone."""

import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.core.errors import RequestAbortedError
from engine.core.messages import RequestState
from engine.core.request import FinishReason
from server.protocol.live_requests import LiveRequestList
from tests.server.auth.key_files import bearer, write
from tests.server.events import chunks_of, error_of
from tests.server.late_engine import LateEngine, outputs_of
from tests.server.live_server import TIMEOUT_S, LiveServer, live_server


class PendingRequest:
    """An HTTP request in a thread of its own, under an id."""

    def __init__(self, server: LiveServer, path: str, body: dict[str, Any], name: str, key: str | None = None) -> None:
        headers = {"X-Request-Id": name, **(bearer(key) if key else {})}
        self._responses: list[httpx.Response] = []
        self._thread = threading.Thread(
            target=lambda: self._responses.append(server.post_json(path, body, headers)), daemon=True
        )
        self._thread.start()

    @property
    def response(self) -> httpx.Response:
        self._thread.join(TIMEOUT_S)
        return self._responses[0]


def ask(server: LiveServer, at: int = 2, name: str = "mine", key: str | None = None, **fields: Any) -> PendingRequest:
    """Starts a completion whose sequences wait before token number `at`."""
    server.engine.hold_at = at
    num_holding = server.engine.num_holding + fields.get("n", 1)
    pending = PendingRequest(server, "/v1/completions", {"prompt": "Hi", "max_tokens": 9, **fields}, name, key)
    server.wait_until(lambda: server.engine.num_holding == num_holding)
    return pending


def abort(server: LiveServer, name: str = "mine", key: str | None = None) -> httpx.Response:
    return server.client.delete(f"/v1/requests/{name}", headers=bearer(key) if key else {})


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_request_ends_with_the_tokens_it_has(server: LiveServer, stream: bool, n: int) -> None:
    pending = ask(server, stream=stream, n=n)
    assert abort(server).json() == {"id": "mine", "object": "request", "deleted": True}
    response = pending.response
    ends = chunks_of(response)[-n:] if stream else [response.json()]
    choices = [choice for end in ends for choice in end["choices"]]
    assert [(each["finish_reason"], each["stop_reason"]) for each in choices] == [("length", "abort")] * n
    if stream:
        assert response.text.endswith("data: [DONE]\n\n") and "error" not in response.text
    else:
        assert response.json()["usage"]["completion_tokens"] == 2 * n


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_without_a_token_an_aborted_request_is_an_error(server: LiveServer, stream: bool, n: int) -> None:
    pending = ask(server, at=0, stream=stream, n=n)
    assert abort(server).status_code == 200
    assert (pending.response.status_code, error_of(pending.response)["code"]) == (499, "request_aborted")
    server.wait_until_idle()
    assert len(server.engine.finished) == n and FinishReason.LENGTH not in server.engine.finished


class AbortedEngine(LateEngine):
    end = RequestAbortedError("Aborted.")


def test_a_sequence_without_a_token_is_aborted_as_its_siblings_are() -> None:
    (last,) = [output for index, output in outputs_of(AbortedEngine(hold_at=1), deadline_s=None) if index == 1]
    assert (last.finish_reason, last.stop_reason, last.token_ids) == (FinishReason.LENGTH, "abort", ())


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
    "/v1/embeddings": {"input": "Hi"},
}


@pytest.mark.parametrize(("path", "status"), [*zip(BODIES, (499, 499, 400, 499), strict=True)])
def test_every_endpoint_reports_an_abort(server: LiveServer, path: str, status: int) -> None:
    server.engine.hold_at = 0
    pending = PendingRequest(server, path, BODIES[path], "mine")
    server.wait_until(lambda: server.engine.num_holding == 1)
    abort(server)
    assert (pending.response.status_code, "aborted" in pending.response.text) == (status, True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_every_kind_of_stream_ends_cleanly_with_an_abort(server: LiveServer, path: str) -> None:
    server.engine.hold_at = 2
    pending = PendingRequest(server, path, {**BODIES[path], "stream": True}, "mine")
    server.wait_until(lambda: server.engine.num_holding == 1)
    abort(server)
    last = {"/v1/chat/completions": "[DONE]", "/v1/responses": "response.incomplete", "/v1/messages": "message_stop"}
    assert last[path] in pending.response.text and '"error":{' not in pending.response.text


def test_all_requests_of_one_id_end(server: LiveServer) -> None:
    all_pending = [ask(server), ask(server)]
    other = ask(server, name="other")
    assert abort(server).status_code == 200
    assert [each.response.json()["choices"][0]["stop_reason"] for each in all_pending] == ["abort", "abort"]
    assert abort(server).status_code == 404 and server.engine.num_live == 1
    server.engine.hold_at = None
    assert other.response.json()["choices"][0]["stop_reason"] is None


@pytest.mark.parametrize("name", ["unknown", "a/b", "%00", "x" * 1000])
def test_what_is_not_live_is_not_found(server: LiveServer, name: str) -> None:
    error = error_of(response := abort(server, name))
    assert (response.status_code, error["code"]) == (404, "request_not_found")


def test_an_id_may_have_slashes(server: LiveServer) -> None:
    pending = ask(server, name="a/b?c")
    assert abort(server, "a/b%3Fc").json()["id"] == "a/b?c"
    assert pending.response.json()["choices"][0]["stop_reason"] == "abort"


@pytest.fixture
def two_keys(tmp_path: Path) -> Generator[LiveServer, None, None]:
    with live_server(api_keys_file=write(tmp_path)) as running:
        yield running


def test_a_key_ends_its_own_requests_only(two_keys: LiveServer) -> None:
    pending, other = ask(two_keys, key="alice"), ask(two_keys, key="bob")
    assert abort(two_keys).status_code == 401
    assert abort(two_keys, key="bob").status_code == 200
    assert other.response.json()["choices"][0]["stop_reason"] == "abort"
    assert abort(two_keys, key="bob").status_code == 404 and two_keys.engine.num_live == 1
    assert abort(two_keys, key="alice").status_code == 200
    assert pending.response.json()["choices"][0]["stop_reason"] == "abort"


# What live requests report.


def show(server: LiveServer, name: str = "/mine", key: str | None = None) -> httpx.Response:
    return server.client.get(f"/v1/requests{name}", headers=bearer(key) if key else {})


def test_a_live_request_reports_its_progress(server: LiveServer) -> None:
    pending = ask(server)
    body = show(server).json()
    assert body.pop("age_ms") > 0
    sequence = {"phase": "decode", "queue_position": None, "prompt_tokens": 3, "cached_tokens": 1, "computed_tokens": 5}
    sequence |= {"generated_tokens": 2, "kv_blocks": 2, "queue_ms": 1.0, "ttft_ms": 3.0}
    sequence |= {"predicted_end_ms": 3.5}
    assert body == {"id": "mine", "object": "request", "sequences": [sequence]}
    abort(server)
    assert pending.response.status_code == 200 and show(server).status_code == 404


@pytest.mark.parametrize(
    ("state", "phase", "position"),
    [
        (RequestState("", num_before=2), "queue", 3),
        (RequestState(""), "queue", None),
        (RequestState("", was_scheduled=True, num_before=0), "prefill", 1),
        (RequestState("", was_scheduled=True), "prefill", None),
        (None, None, None),
    ],
)
def test_before_the_first_token_the_engine_reports_the_phase(
    server: LiveServer, state: RequestState | None, phase: str | None, position: int | None
) -> None:
    pending = ask(server, at=0)
    server.engine.state = state
    (sequence,) = show(server).json()["sequences"]
    assert (sequence["phase"], sequence["queue_position"]) == (phase, position)
    assert sequence["queue_ms"] is sequence["ttft_ms"] is sequence["predicted_end_ms"] is None and (
        sequence["kv_blocks"] is None
    ) == (state is None)
    abort(server)
    assert pending.response.status_code == 499


def test_what_the_engine_does_not_report_is_null(server: LiveServer) -> None:
    pending = ask(server)
    server.engine.state = None
    (sequence,) = show(server).json()["sequences"]
    unknown = {name for name, value in sequence.items() if value is None}
    assert unknown == {"queue_position", "cached_tokens", "computed_tokens", "kv_blocks"}
    abort(server)
    assert pending.response.status_code == 200


def test_all_are_listed_by_id_the_oldest_first(server: LiveServer) -> None:
    assert show(server, "").json() == {"object": "list", "data": [], "has_more": False}
    all_pending = [ask(server, name="b", n=2), ask(server, name="a"), ask(server, name="b")]
    listed = show(server, "").json()
    assert [(each["id"], len(each["sequences"])) for each in listed["data"]] == [("b", 3), ("a", 1)]
    assert listed["data"][0] | {"age_ms": 0} == show(server, "/b").json() | {"age_ms": 0}
    LiveRequestList.model_validate(listed, strict=True)
    server.engine.hold_at = None
    assert [each.response.status_code for each in all_pending] == [200] * 3


def test_a_long_list_says_that_it_goes_on(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.routes.requests.MAX_SEQUENCES", 2)
    all_pending = [ask(server, name=name) for name in "ab"]
    assert show(server, "").json()["has_more"] is False
    all_pending.append(ask(server, name="c"))
    listed = show(server, "").json()
    assert ([each["id"] for each in listed["data"]], listed["has_more"]) == (["a", "b"], True)
    server.engine.hold_at = None
    assert [each.response.status_code for each in all_pending] == [200] * 3


def test_a_key_sees_its_own_requests_only(two_keys: LiveServer) -> None:
    pending = ask(two_keys, key="alice")
    assert (show(two_keys).status_code, show(two_keys, "").status_code) == (401, 401)
    assert show(two_keys, key="bob").status_code == 404 and show(two_keys, "", "bob").json()["data"] == []
    assert show(two_keys, key="alice").json()["id"] == "mine" and len(show(two_keys, "", "alice").json()["data"]) == 1
    two_keys.engine.hold_at = None
    assert pending.response.status_code == 200
