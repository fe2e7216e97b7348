"""/v1/requests: what is live can be ended by its id, and by its own key alone."""

import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import RequestAbortedError
from engine.request import FinishReason
from tests.server.events import chunks_of, error_of
from tests.server.live_server import TIMEOUT_S, LiveServer, live_server
from tests.server.test_api_keys import bearer, write
from tests.server.test_overload import LateEngine, outputs_of


class Asking:
    """A request in a thread of its own, under an id."""

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


def ask(server: LiveServer, at: int = 2, name: str = "mine", key: str | None = None, **fields: Any) -> Asking:
    """A completion whose sequences wait before token number `at`."""
    server.engine.hold_at = at
    num_holding = server.engine.num_holding + fields.get("n", 1)
    asking = Asking(server, "/v1/completions", {"prompt": "Hi", "max_tokens": 9, **fields}, name, key)
    server.wait_until(lambda: server.engine.num_holding == num_holding)
    return asking


def abort(server: LiveServer, name: str = "mine", key: str | None = None) -> httpx.Response:
    return server.client.delete(f"/v1/requests/{name}", headers=bearer(key) if key else {})


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_request_ends_with_the_tokens_it_has(server: LiveServer, stream: bool, n: int) -> None:
    asking = ask(server, stream=stream, n=n)
    assert abort(server).json() == {"id": "mine", "object": "request", "deleted": True}
    response = asking.response
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
    asking = ask(server, at=0, stream=stream, n=n)
    assert abort(server).status_code == 200
    assert (asking.response.status_code, error_of(asking.response)["code"]) == (499, "request_aborted")
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
def test_every_endpoint_tells_an_abort(server: LiveServer, path: str, status: int) -> None:
    server.engine.hold_at = 0
    asking = Asking(server, path, BODIES[path], "mine")
    server.wait_until(lambda: server.engine.num_holding == 1)
    abort(server)
    assert (asking.response.status_code, "aborted" in asking.response.text) == (status, True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_every_kind_of_stream_ends_cleanly_with_an_abort(server: LiveServer, path: str) -> None:
    server.engine.hold_at = 2
    asking = Asking(server, path, {**BODIES[path], "stream": True}, "mine")
    server.wait_until(lambda: server.engine.num_holding == 1)
    abort(server)
    last = {"/v1/chat/completions": "[DONE]", "/v1/responses": "response.incomplete", "/v1/messages": "message_stop"}
    assert last[path] in asking.response.text and '"error":{' not in asking.response.text


def test_all_requests_of_one_id_end(server: LiveServer) -> None:
    askings = [ask(server), ask(server)]
    other = ask(server, name="other")
    assert abort(server).status_code == 200
    assert [each.response.json()["choices"][0]["stop_reason"] for each in askings] == ["abort", "abort"]
    assert abort(server).status_code == 404 and server.engine.num_live == 1
    server.engine.hold_at = None
    assert other.response.json()["choices"][0]["stop_reason"] is None


@pytest.mark.parametrize("name", ["unknown", "a/b", "%00", "x" * 1000])
def test_what_is_not_live_is_not_found(server: LiveServer, name: str) -> None:
    error = error_of(response := abort(server, name))
    assert (response.status_code, error["code"]) == (404, "request_not_found")


def test_an_id_may_have_slashes(server: LiveServer) -> None:
    asking = ask(server, name="a/b?c")
    assert abort(server, "a/b%3Fc").json()["id"] == "a/b?c"
    assert asking.response.json()["choices"][0]["stop_reason"] == "abort"


@pytest.fixture
def two_keys(tmp_path: Path) -> Generator[LiveServer, None, None]:
    with live_server(api_keys_file=write(tmp_path)) as running:
        yield running


def test_a_key_ends_its_own_requests_only(two_keys: LiveServer) -> None:
    asking, other = ask(two_keys, key="alice"), ask(two_keys, key="bob")
    assert abort(two_keys).status_code == 401
    assert abort(two_keys, key="bob").status_code == 200
    assert other.response.json()["choices"][0]["stop_reason"] == "abort"
    assert abort(two_keys, key="bob").status_code == 404 and two_keys.engine.num_live == 1
    assert abort(two_keys, key="alice").status_code == 200
    assert asking.response.json()["choices"][0]["stop_reason"] == "abort"
