"""The application on Ray Serve, without a Ray that runs: what gateway, request router and autoscaling decide.
`python -m tests.soak.replicas` runs all of it."""

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
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
    from deploy.ray.autoscaling import ByWaitingTokens
    from deploy.ray.gateway import MAX_MOVES, Gateway
    from deploy.ray.replica import Call, Head
    from deploy.ray.request_router import PolicyRequestRouter
    from deploy.ray.roles import Role
    from deploy.ray.settings import ClusterSettings

from server.auth.api_keys import digest_of, read_keys  # noqa: E402
from server.routing.policies import new_policy  # noqa: E402
from server.routing.prompt_digests import prompt_of_tokens  # noqa: E402
from server.routing.recording import RecordingPolicy, replay  # noqa: E402

HEAD = {"id": "cmpl-1", "created": 1, "model": "m", "system_fingerprint": "fp", "seed": 5}
Replica = Callable[[Call], AsyncIterator[Head | bytes]]


class Parts:
    """What a handle returns of a replica's generator."""

    def __init__(self, parts: AsyncIterator[Head | bytes]) -> None:
        self._parts = parts
        self.is_cancelled = False

    def __aiter__(self) -> AsyncIterator[Head | bytes]:
        return self._parts

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
        self.metrics: str | Exception = "# HELP a A.\n# TYPE a gauge\na 1\n"

    def options(self, stream: bool) -> "Handle":
        return self

    def broadcast(self, method: str, call: Call) -> Any:
        async def results() -> list[tuple[Head, bytes]]:
            if isinstance(self.metrics, Exception):
                raise self.metrics
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

    async def parts(call: Call) -> AsyncIterator[Head | bytes]:
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

    async def parts(call: Call) -> AsyncIterator[Head | bytes]:
        yield Head(name, 200, [("content-type", "text/event-stream")])
        for number in range(first, last):
            yield b'event: x\ndata: {"type":"x","number":%d}\n\n' % number
            yield b': {"seed":5,"token_ids":[%d]}\n\n' % number
        if dies:
            raise RayError
        yield b'event: message_stop\ndata: {"type":"message_stop","number":%d}\n\n' % last

    return parts


def dead(call: Call) -> AsyncIterator[Head | bytes]:
    async def parts() -> AsyncIterator[Head | bytes]:
        raise RayError
        yield b""

    return parts()


def ask(
    handle: Handle,
    body: Any,
    path: str = "/v1/completions",
    max_bytes: int = 10_000,
    prefills: Handle | None = None,
    prefill_key: str = "",
) -> tuple[int, bytes]:
    """Returns status and body of the gateway's answer to a caller whose key is "key"."""

    async def run() -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": data, "more_body": False}

        headers = [(b"authorization", b"Bearer key"), (b"host", b"x"), (b"content-length", b"1")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"a=b", "headers": headers}
        response = await Gateway(handle, max_bytes, prefills, prefill_key)(Request(scope, receive))
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
        handle = Handle(streaming(0, 2, dies=True), dead)
        status, data = ask(handle, {"prompt": "x", "stream": True})
        assert status == 200 and b"server_is_overloaded" in data and data.endswith(b"data: [DONE]\n\n")
        assert len(handle.calls) == 1 + MAX_MOVES + 1

    def test_full_replicas_do_not_end_a_stream_that_has_begun(self) -> None:
        handle = Handle(streaming(0, 2, dies=True), streaming(0, 0, status=429), streaming(0, 5))
        status, data = ask(handle, {"prompt": "x", "stream": True})
        assert status == 200 and texts(data) == [f"<{number}>" for number in range(5)]

    def test_a_refusal_is_the_clients(self) -> None:
        handle = Handle(streaming(0, 0, status=400))
        assert ask(handle, {"prompt": "x", "stream": True}) == (400, b'{"error": {}}')
        assert len(handle.calls) == 1

    def test_what_no_replica_begins_is_refused(self) -> None:
        for body in ({"prompt": "x", "stream": True}, {"prompt": "x"}):
            handle = Handle(dead)
            status, data = ask(handle, body)
            assert status == 503 and b"server_is_overloaded" in data
            assert len(handle.calls) == MAX_MOVES + 1

    def test_what_was_not_begun_is_sent_again(self) -> None:
        handle = Handle(dead, streaming(0, 0, status=400, name="b"))
        assert ask(handle, {"prompt": "x"}) == (400, b'{"error": {}}')
        handle = Handle(dead, streaming(0, 5))
        assert ask(handle, {"prompt": "x", "stream": True})[0] == 200

    def test_streams_of_typed_events_go_on_behind_their_tokens(self) -> None:
        handle = Handle(typed(0, 2, dies=True), typed(0, 3, dies=True, name="b"), typed(0, 5, name="c"))
        status, data = ask(handle, {"messages": [], "stream": True}, "/v1/messages")
        sent = [json.loads(call.body) for call in handle.calls]
        assert status == 200 and [each.get("resume_token_ids") for each in sent] == [None, [[0, 1]], [[0, 1, 2]]]
        assert b"token_ids" not in data
        numbers = [int(line[-2:-1]) for line in data.split(b"\n") if line.startswith(b"data: ")]
        assert numbers == [0, 1, 2, 3, 4, 5] and b"event: message_stop" in data

    def test_streams_of_typed_events_that_no_replica_goes_on_with_end_with_their_own_errors(self) -> None:
        status, data = ask(Handle(typed(0, 2, dies=True), dead), {"messages": [], "stream": True}, "/v1/messages")
        assert status == 200 and data.endswith(b"\n\n") and b"event: error" in data

    def test_lines_end_with_an_error_unless_they_are_one_answer(self) -> None:
        for body in ({}, {"stream": True}, {"stream": False}):
            status, data = ask(Handle(streaming(0, 2, dies=True)), body, "/api/chat")
            assert status == 200 and data.endswith(b'gone, and no other could take it over; try again."}\n') == (
                body != {"stream": False}
            )

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
        handle, prefills = Handle(), Handle(dead, streaming(0, 5))
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
        def gone(call: Call) -> AsyncIterator[Head | bytes]:
            async def parts() -> AsyncIterator[Head | bytes]:
                raise error
                yield b""

            return parts()

        handle, prefills = Handle(), Handle(gone)
        status, _ = ask(handle, {"token_ids": [1]}, "/v1/prefill", prefills=prefills, prefill_key="key")
        assert status == 503, "the decode server computes it then"
        assert ask(handle, {}, "/metrics", prefills=prefills)[1].count(b"\na{") == 2
        prefills.metrics = error
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


class TestRequestRouter:
    def router(self, *names: str, **stats: tuple[int, int]) -> Any:
        """A router that knows these replicas, without what Ray adds to it."""
        router = object.__new__(PolicyRequestRouter)
        router.initialize_state("prefix-aware")
        self.replicas = [
            SimpleNamespace(
                replica_id=SimpleNamespace(unique_id=name),
                routing_stats=dict(zip(("waiting_tokens", "requests_running"), stats.get(name, ()), strict=False)),
            )
            for name in names
        ]
        return router

    def choose(self, router: Any, **asked: Any) -> list[list[str]]:
        request = SimpleNamespace(kwargs=asked)
        ranks = asyncio.run(router.choose_replicas(self.replicas, request))
        return [[replica.replica_id.unique_id for replica in rank] for rank in ranks]

    def known(self, monkeypatch: pytest.MonkeyPatch, *names: str, **stats: tuple[int, int]) -> Any:
        router = self.router(*names, **stats)
        monkeypatch.setattr("ray.serve.request_router.RequestRouter.update_replicas", lambda *_: None)
        router.update_replicas(self.replicas)
        return router

    def test_decisions_are_recorded_where_a_directory_is_named(self, tmp_path: Path) -> None:
        for _ in range(2):
            router = PolicyRequestRouter.__new__(PolicyRequestRouter)
            router.initialize_state("least-loaded", str(tmp_path / "new"))
            router._policy.add("r")
            assert router._policy.choose(prompt_of_tokens([1], "")) == "r"
            assert isinstance(router._policy, RecordingPolicy)
            router._policy._file.close()
        files = list((tmp_path / "new").iterdir())
        assert [replay(each.read_text().splitlines()).num_decisions for each in files] == [1, 1]

    def test_the_policys_choice_comes_first_and_all_others_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        router = self.known(monkeypatch, "a", "b", "c", a=(500, 0), b=(0, 0), c=(100, 1))
        assert self.choose(router) == [["b"], ["a", "c"]]

    def test_what_failed_a_request_is_not_asked_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        router = self.known(monkeypatch, "a", "b", b=(500, 0), a=(0, 0))
        assert self.choose(router, excluded=("a",)) == [["b"], ["a"]]
        assert self.choose(router, excluded=("a", "b")) == [["a", "b"]]

    def test_replicas_that_left_are_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        router = self.known(monkeypatch, "a", "b", a=(0, 0), b=(900, 0))
        router.update_replicas(self.replicas[1:])
        self.replicas = self.replicas[1:]
        assert self.choose(router) == [["b"], []]


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ({}, 3),
        ({"waiting_tokens": {"a": 0.0}, "sequences": {"a": 0.0}}, 1),
        ({"waiting_tokens": {"a": 900.0, "b": 101.0}, "sequences": {"a": 1.0}}, 11),
        ({"waiting_tokens": {"a": 0.0}, "sequences": {"a": 4.0, "b": 5.0}}, 3),
    ],
)
def test_replicas_are_as_many_as_what_waits_and_runs_asks_for(reports: dict[str, Any], expected: int) -> None:
    policy = ByWaitingTokens(waiting_tokens=100, sequences=4)
    context = SimpleNamespace(aggregated_metrics=reports, current_num_replicas=3)
    assert policy(context) == (expected, {})


def test_the_application_is_built_of_its_settings() -> None:
    application = app(ClusterSettings(routing="random", max_replicas=7))
    assert application is not None


def test_the_file_for_deploying_has_settings_that_exist() -> None:
    path = Path(__file__).resolve().parents[2] / "deploy" / "ray" / "config.yaml"
    (application,) = yaml.safe_load(path.read_text(encoding="utf-8"))["applications"]
    assert application["import_path"] == "deploy.ray:app"
    ClusterSettings.model_validate(application["args"])


def test_every_routing_that_can_be_named_exists() -> None:
    for name in ClusterSettings.model_fields["routing"].annotation.__args__:
        assert new_policy(name).choose is not None
