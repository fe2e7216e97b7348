"""The gateway of the application on Ray Serve, without a Ray that runs: `python -m tests.soak.replicas` runs it all."""

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.requests import Request

pytest.importorskip("ray", reason="pip install -e '.[ray]' brings Ray Serve")
pytestmark = pytest.mark.slow

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, while it is imported
    from ray.exceptions import RayError
    from ray.serve._private.common import DeploymentID
    from ray.serve.exceptions import DeploymentUnavailableError

    from deploy.ray import app
    from deploy.ray.gateway import Gateway
    from deploy.ray.replica import Call, Head
    from deploy.ray.roles import Role
    from deploy.ray.settings import ClusterSettings

from server.auth.api_keys import digest_of, read_keys  # noqa: E402
from server.routing.moves import MAX_MOVES, ReplicaLostError  # noqa: E402
from server.routing.prompt_digests import prompt_of_tokens  # noqa: E402

HEAD = {"id": "cmpl-1", "created": 1, "model": "m", "system_fingerprint": "fp", "seed": 5}
Replica = Callable[[Call], AsyncIterator[str | Head | bytes]]
WAIT_S = 60.0


class Parts:
    """What a handle returns of a replica's generator."""

    def __init__(self, parts: AsyncIterator[str | Head | bytes]) -> None:
        self._parts = parts
        self.is_cancelled = False

    def __aiter__(self) -> "Parts":
        return self

    async def __anext__(self) -> str | Head | bytes:
        return await anext(self._parts)

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """A handle whose n-th call goes to the n-th replica, and all further ones to the last."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas = replicas
        self.calls: list[Call] = []
        self.asked: list[dict[str, Any]] = []
        self.parts: list[Parts] = []
        self.forward = SimpleNamespace(remote=self._forward)
        self.metrics = "# HELP a A.\n# TYPE a gauge\na 1\n"
        self.gone: Exception | None = None
        self.answers: list[tuple[Head, bytes] | Exception] | None = None

    def options(self, stream: bool) -> "Handle":
        return self

    def broadcast(self, method: str, call: Call) -> Any:
        async def results(return_exceptions: bool) -> list[tuple[Head, bytes] | Exception]:
            if self.gone:
                raise self.gone
            if self.answers is not None:
                return self.answers
            return [(Head(f"replica-{id(self)}", 200, []), self.metrics.encode())]

        return SimpleNamespace(results_async=results)

    def _forward(self, call: Call, **asked: Any) -> Parts:
        replica = self.replicas[min(len(self.calls), len(self.replicas) - 1)]
        self.calls.append(call)
        self.asked.append(asked)
        self.parts.append(Parts(replica(call)))
        return self.parts[-1]


def event(number: int, **fields: Any) -> bytes:
    choice = {"index": 0, "text": f"<{number}>", "token_ids": [number], "finish_reason": None, **fields}
    return b"data: " + json.dumps({**HEAD, "choices": [choice]}).encode() + b"\n\n"


def streaming(first: int, last: int, dies: bool = False, name: str = "a", status: int = 200) -> Replica:
    """A replica that sends the tokens [first, last), of which those below 5 are there, and then dies or ends."""

    async def parts(call: Call) -> AsyncIterator[str | Head | bytes]:
        yield name
        yield Head(name, status, [("content-type", "text/event-stream"), ("date", "now")])
        if status != 200:
            yield b'{"error": {}}'
            return
        for number in range(first, last):
            yield event(number, finish_reason="length" if number == 4 else None)
        if dies:
            raise RayError
        yield b"data: [DONE]\n\n"

    return parts


def typed(first: int, last: int, dies: bool = False, name: str = "a") -> Replica:
    """The same with typed events."""

    async def parts(call: Call) -> AsyncIterator[str | Head | bytes]:
        yield name
        yield Head(name, 200, [("content-type", "text/event-stream")])
        for number in range(first, last):
            yield b'event: x\ndata: {"type":"x","number":%d}\n\n' % number
            yield b': {"seed":5,"token_ids":[%d],"cached":{}}\n\n' % number
        if dies:
            raise RayError
        yield b'event: message_stop\ndata: {"type":"message_stop","number":%d}\n\n' % last

    return parts


def lined(first: int, last: int, dies: bool = False, name: str = "a") -> Replica:
    """The same with lines of JSON."""

    async def parts(call: Call) -> AsyncIterator[str | Head | bytes]:
        yield name
        yield Head(name, 200, [("content-type", "application/x-ndjson")])
        for number in range(first, last):
            yield b'{"created_at":"%s","response":"%d","done":false}\n' % (name.encode(), number)
            yield b'{"resume_point":{"seed":5,"token_ids":[%d],"cached":{}}}\n' % number
        if dies:
            raise RayError
        yield b'{"created_at":"%s","response":"","done":true}\n' % name.encode()

    return parts


async def dying(call: Call) -> AsyncIterator[str | Head | bytes]:
    """A replica that dies of the request."""
    yield "dying"
    raise RayError


async def gone(call: Call) -> AsyncIterator[str | Head | bytes]:
    """A replica that died before the request came."""
    raise RayError
    yield b""


async def silent(call: Call) -> AsyncIterator[str | Head | bytes]:
    """What there is while no replica runs."""
    await asyncio.Event().wait()
    yield b""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.routing.moves._PAUSES_S", (0.001,))


def ask(
    handle: Handle,
    body: Any,
    path: str = "/v1/completions",
    max_bytes: int = 10_000,
    prefills: Handle | None = None,
    prefill_key: str = "",
    wait_s: float = WAIT_S,
) -> tuple[int, bytes]:
    """Returns status and body of the gateway's answer to a caller whose key is "key"."""

    async def run() -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": data, "more_body": False}

        headers = [(b"authorization", b"Bearer key"), (b"host", b"x"), (b"content-length", b"1")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"a=b", "headers": headers}
        response = await Gateway(handle, max_bytes, wait_s, prefills, prefill_key)(Request(scope, receive))
        if not hasattr(response, "body_iterator"):
            return response.status_code, bytes(response.body)
        assert "date" not in response.headers
        return response.status_code, b"".join([part async for part in response.body_iterator])

    return asyncio.run(run())


def texts(data: bytes) -> list[str]:
    events = [each.removeprefix(b"data: ") for each in data.split(b"\n\n") if each]
    assert events.pop() == b"[DONE]"
    return [json.loads(each)["choices"][0]["text"] for each in events]


class TestGateway:
    def test_a_stream_goes_on_behind_its_tokens(self) -> None:
        handle = Handle(streaming(0, 2, dies=True), streaming(0, 3, dies=True, name="b"), streaming(0, 5, name="c"))
        status, data = ask(handle, {"prompt": "x", "stream": True})
        assert status == 200
        sent = [json.loads(call.body) for call in handle.calls]
        assert [each.get("resume_token_ids") for each in sent] == [None, [[0, 1]], [[0, 1, 2]]]
        assert [each.get("seed") for each in sent] == [None, 5, 5]
        assert [asked["excluded"] for asked in handle.asked] == [(), ("a",), ("a", "b")]
        assert b"token_ids" not in data
        assert all(parts.is_cancelled for parts in handle.parts)
        assert texts(data) == [f"<{number}>" for number in range(5)]

    def test_a_stream_that_no_replica_goes_on_with_ends_with_an_error(self) -> None:
        handle = Handle(streaming(0, 2, dies=True), dying)
        status, data = ask(handle, {"prompt": "x", "stream": True})
        assert status == 200 and b"server_is_overloaded" in data and data.endswith(b"data: [DONE]\n\n")
        assert len(handle.calls) == 1 + MAX_MOVES

    def test_full_replicas_do_not_end_a_stream_that_has_begun(self) -> None:
        handle = Handle(streaming(0, 2, dies=True), streaming(0, 0, status=429), streaming(0, 5))
        status, data = ask(handle, {"prompt": "x", "stream": True})
        assert status == 200 and texts(data) == [f"<{number}>" for number in range(5)]

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
    @pytest.mark.parametrize("unready", [gone, silent, streaming(0, 0, status=429), streaming(0, 0, status=503)])
    def test_a_stream_waits_for_a_replica_and_not_for_ever(self, path: str, unready: Replica) -> None:
        sending = typed if path == "/v1/messages" else streaming
        if unready is not silent:
            handle = Handle(sending(0, 2, dies=True), *[unready] * 3 * MAX_MOVES, sending(0, 5))
            assert b"error" not in ask(handle, {"messages": [], "stream": True}, path)[1]
        handle = Handle(sending(0, 2, dies=True), unready)
        status, data = ask(handle, {"messages": [], "stream": True}, path, wait_s=0.1)
        assert status == 200 and b"error" in data and all(parts.is_cancelled for parts in handle.parts)

    @pytest.mark.parametrize("unready", [gone, silent])
    def test_what_has_not_begun_waits_too(self, unready: Replica) -> None:
        assert ask(Handle(unready), {"prompt": "x"}, wait_s=0.1)[0] == 503
        if unready is gone:
            assert ask(Handle(*[gone] * 3 * MAX_MOVES, streaming(0, 5)), {"prompt": "x"})[0] == 200

    def test_a_replica_whose_name_is_all_that_came_is_excluded(self) -> None:
        handle = Handle(dying, streaming(0, 5))
        assert ask(handle, {"prompt": "x", "stream": True})[0] == 200
        assert [asked["excluded"] for asked in handle.asked] == [(), ("dying",)]

    def test_a_refusal_is_the_clients(self) -> None:
        handle = Handle(streaming(0, 0, status=400))
        assert ask(handle, {"prompt": "x", "stream": True}) == (400, b'{"error": {}}')
        assert len(handle.calls) == 1

    def test_what_no_replica_begins_is_refused(self) -> None:
        for body in ({"prompt": "x", "stream": True}, {"prompt": "x"}):
            handle = Handle(dying)
            status, data = ask(handle, body)
            assert status == 503 and b"server_is_overloaded" in data
            assert len(handle.calls) == MAX_MOVES + 1

    def test_what_was_not_begun_is_sent_again(self) -> None:
        handle = Handle(dying, streaming(0, 0, status=400, name="b"))
        assert ask(handle, {"prompt": "x"}) == (400, b'{"error": {}}')
        handle = Handle(dying, streaming(0, 5))
        assert ask(handle, {"prompt": "x", "stream": True})[0] == 200

    def test_streams_of_typed_events_go_on_behind_their_tokens(self) -> None:
        handle = Handle(typed(0, 2, dies=True), typed(0, 3, dies=True, name="b"), typed(0, 5, name="c"))
        status, data = ask(handle, {"messages": [], "stream": True}, "/v1/messages")
        sent = [json.loads(call.body) for call in handle.calls]
        assert status == 200 and [each.get("resume_token_ids") for each in sent] == [None, [[0, 1]], [[0, 1, 2]]]
        assert b"token_ids" not in data
        numbers = [int(line[-2:-1]) for line in data.split(b"\n") if line.startswith(b"data: ")]
        assert numbers == [0, 1, 2, 3, 4, 5] and b"event: message_stop" in data

    def test_streams_that_no_replica_goes_on_with_end_with_their_own_errors(self) -> None:
        status, data = ask(Handle(typed(0, 2, dies=True), dying), {"messages": [], "stream": True}, "/v1/messages")
        assert status == 200 and data.endswith(b"\n\n") and b"event: error" in data
        status, data = ask(Handle(lined(0, 2, dies=True), dying), {}, "/api/chat")
        assert status == 200 and data.endswith(b'gone, and no other could take it over; try again."}\n')

    def test_streams_of_lines_go_on_behind_their_tokens(self) -> None:
        handle = Handle(lined(0, 2, dies=True), lined(0, 3, dies=True, name="b"), lined(0, 5, name="c"))
        status, data = ask(handle, {}, "/api/generate")
        sent = [json.loads(call.body) for call in handle.calls]
        given = [(each.get("options"), each.get("resume_token_ids")) for each in sent]
        assert status == 200 and given == [(None, None), ({"seed": 5}, [[0, 1]]), ({"seed": 5}, [[0, 1, 2]])]
        lines = [json.loads(each) for each in data.splitlines()]
        assert [(each["created_at"], each["response"]) for each in lines] == [("a", text) for text in (*"01234", "")]

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/api/chat"])
    def test_half_an_answer_breaks_the_connection(self, path: str) -> None:
        with pytest.raises(ReplicaLostError):
            ask(Handle(streaming(0, 2, dies=True)), {"prompt": "x", "stream": False}, path)

    @pytest.mark.parametrize("path", ["/reset_prefix_cache", "/v1/load_lora_adapter"])
    def test_what_all_are_to_do_needs_one_that_is_there(self, path: str) -> None:
        handle = Handle()
        for handle.answers in ([], [RayError()]):
            assert ask(handle, {}, path)[0] == 503
        handle.answers, handle.gone = None, RayError()
        assert ask(handle, {}, path)[0] == 503

    def test_a_replica_that_dies_hides_no_answer_of_the_others(self) -> None:
        handle = Handle()
        handle.answers = [RayError(), (Head("b", 500, []), b"no"), (Head("c", 200, []), b"a 1\n")]
        assert ask(handle, {}, "/reset_prefix_cache") == (200, b"a 1\n")
        assert ask(handle, {}, "/metrics")[0] == 200
        handle.answers = [ValueError("a mistake of our own")]
        with pytest.raises(ValueError, match="mistake"):
            ask(handle, {}, "/metrics")

    @pytest.mark.parametrize(
        ("statuses", "num_lost", "expected"),
        [
            *[([200, 200], 0, 200), ([404, 200], 0, 200), ([404, 404], 0, 404), ([400, 400], 0, 400)],
            *[([200, 400], 0, 503), ([200, 200], 1, 503), ([400], 1, 400)],
        ],
    )
    def test_all_replicas_have_the_same_adapters_or_the_answer_is_an_error(
        self, statuses: list[int], num_lost: int, expected: int
    ) -> None:
        handle = Handle()
        handle.answers = [(Head(f"r{number}", status, []), b"said") for number, status in enumerate(statuses)]
        handle.answers += [RayError()] * num_lost
        status, data = ask(handle, {"lora_name": "a"}, "/v1/load_lora_adapter")
        assert status == expected and not handle.calls
        assert (b"r1: said" in data) == (statuses == [200, 400])

    def test_replicas_get_the_request_as_it_was(self) -> None:
        handle = Handle(streaming(0, 0, status=400))
        ask(handle, b"no JSON")
        (call,) = handle.calls
        assert (call.method, call.path, call.body) == ("POST", "/v1/completions?a=b", b"no JSON")
        names = [name for name, _ in call.headers]
        assert names == ["authorization", "x-request-id"]

    def test_the_request_router_is_told_what_it_needs(self) -> None:
        handle = Handle(streaming(0, 0, status=400))
        ask(handle, {"prompt": "x" * 600, "prompt_cache_key": "k"})
        assert len(handle.asked[0]["prompt"].digests) == 1 and handle.asked[0]["prompt"].key.endswith("k")

    def test_large_bodies_are_refused(self) -> None:
        handle = Handle(streaming(0, 0))
        assert ask(handle, b"x" * 101, max_bytes=100)[0] == 413
        assert not handle.calls


class TestPrefillReplicas:
    def test_replicas_have_them_compute_prompts(self) -> None:
        handle, prefills = Handle(), Handle(dying, streaming(0, 5))
        body = {"token_ids": list(range(64)), "cache_salt": "s"}
        status, data = ask(handle, body, "/v1/prefill", prefills=prefills, prefill_key="key")
        assert status == 200 and data.endswith(b"data: [DONE]\n\n")
        assert not handle.calls and len(prefills.calls) == 2, "the first one died before it answered"
        asked = prefills.asked[1]
        assert asked["prompt"] == prompt_of_tokens(range(64), '["s", null]') and len(asked["prompt"].digests) == 1

    @pytest.mark.parametrize("body", [{}, {"token_ids": 3}, {"token_ids": ["a"]}, {"token_ids": [2**70]}, b"no JSON"])
    def test_what_is_no_prompt_they_refuse_themselves(self, body: Any) -> None:
        prefills = Handle(streaming(0, 0, status=400))
        assert ask(Handle(), body, "/v1/prefill", prefills=prefills, prefill_key="key")[0] == 400
        assert prefills.asked[0]["prompt"].digests == []

    def test_nobody_else_may_ask_them(self) -> None:
        prefills = Handle(streaming(0, 5))
        status, data = ask(Handle(), {"token_ids": [1]}, "/v1/prefill", prefills=prefills, prefill_key="another")
        assert status == 401 and b"invalid_api_key" in data and not prefills.calls

    @pytest.mark.parametrize("error", [RayError(), DeploymentUnavailableError(DeploymentID("Prefill"))])
    def test_where_none_of_them_is_there_the_others_go_on(self, error: Exception) -> None:
        async def gone(call: Call) -> AsyncIterator[str | Head | bytes]:
            raise error
            yield b""

        handle, prefills = Handle(), Handle(gone)
        path = "/v1/prefill"
        status, _ = ask(handle, {"token_ids": [1]}, path, prefills=prefills, prefill_key="key", wait_s=0.1)
        assert status == 503, "the decode server computes it then"
        assert ask(handle, {}, "/metrics", prefills=prefills)[1].count(b"\na{") == 2
        prefills.gone = error
        assert ask(handle, {}, "/metrics", prefills=prefills)[1].count(b"\na{") == 1

    def test_without_them_the_path_is_the_replicas_to_refuse(self) -> None:
        handle = Handle(streaming(0, 0, status=404))
        assert ask(handle, {"token_ids": [1]}, "/v1/prefill")[0] == 404 and len(handle.calls) == 1

    def test_they_need_a_store_that_all_share(self) -> None:
        with pytest.raises(ValidationError, match="--kv-store"):
            ClusterSettings(max_prefill_replicas=1)
        with pytest.raises(ValidationError, match="less than"):
            ClusterSettings(arguments=["--kv-store=/kv"], min_prefill_replicas=2, max_prefill_replicas=1)
        for arguments in (["--kv-store", "/kv"], ["--kv-store=/kv"]):
            assert app(ClusterSettings(arguments=arguments, max_prefill_replicas=2)) is not None

    def test_their_key_is_no_flag_and_no_keys_of_the_application_will_do(self, tmp_path: Path) -> None:
        role = Role.prefill("hidden")
        (tmp_path / "keys").write_text(role.keys_file)
        (key,) = read_keys(tmp_path / "keys")
        assert key.digest == digest_of(b"hidden") and "hidden" not in (*role.flags, role.keys_file)
        assert "hidden" not in Role.decode("http://gateway", "hidden").flags
