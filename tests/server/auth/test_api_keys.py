"""API keys at the server: authentication, the key's terms, and what is counted under its name."""

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from engine.core.errors import ConfigError, OverloadedError
from engine.core.generation_request import SOLE_TENANT, Tenant
from engine.grammar.checker import GrammarChecker
from server.auth.api_keys import plain_keys
from server.auth.key_ring import KeyRing
from server.core.request_record import RequestRecord, attach_record
from server.middleware.auth import AuthMiddleware
from tests.server.auth.key_files import FILE, HASHES, SECRETS, bearer, write
from tests.server.events import error_of
from tests.server.live_server import LiveServer, in_thread, live_server
from tests.server.metrics.published_metrics import advance, parse

CHAT = [{"role": "user", "content": "Hi"}]
ANY_OBJECT = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.fixture
def grammar_askers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The callers in whose names grammars are checked, in order."""
    asked, check = list[str](), GrammarChecker.check

    async def remember(checker: GrammarChecker, grammar: str, tenant: str = "") -> None:
        asked.append(tenant)
        await check(checker, grammar, tenant)

    monkeypatch.setattr(GrammarChecker, "check", remember)
    return asked


@pytest.fixture
def keyed(tmp_path: Path) -> Generator[LiveServer, None, None]:
    with live_server(api_keys_file=write(tmp_path)) as server:
        yield server


def requests_of(server: LiveServer, **parameters: Any) -> list[tuple[str, float, str]]:
    for name in SECRETS:
        assert server.complete("Hi", bearer(name), **parameters).status_code == 200
    return [(request.tenant, request.weight, request.cache_salt) for request in server.engine.requests]


class TestServer:
    def test_without_a_key_nobody_is_answered(self, keyed: LiveServer) -> None:
        assert keyed.complete("Hi").status_code == 401
        assert keyed.complete("Hi", {"Authorization": f"Bearer {HASHES['bob']}"}).status_code == 401

    def test_load_balancers_need_none(self, keyed: LiveServer) -> None:
        assert "waiting_tokens" in keyed.client.get("/load").json()

    def test_the_engine_gets_the_tenant_and_prefixes_are_apart(self, keyed: LiveServer) -> None:
        assert requests_of(keyed, cache_salt="s") == [("alice", 2.0, "alice\0s"), ("bob", 1.0, "bob\0s")]

    def test_admission_is_checked_for_the_keys_tenant(self, keyed: LiveServer) -> None:
        requests_of(keyed)
        assert [request.quota_tenant for request in keyed.engine.requests] == [
            Tenant("alice", 2 / 3),
            Tenant("bob", 1 / 3),
        ]
        assert keyed.engine.last_tenant_checked == Tenant("bob", 1 / 3)

    @pytest.mark.parametrize(
        ("path", "body"),
        [("completions", {"prompt": "Hi"}), ("chat/completions", {"messages": CHAT})],
    )
    def test_grammars_are_tried_in_the_name_of_the_key(
        self, keyed: LiveServer, path: str, body: dict[str, Any], grammar_askers: list[str]
    ) -> None:
        demand = {"structured_outputs": {"choice": ["a", "b"]}, "max_tokens": 1}
        response = keyed.client.post(f"/v1/{path}", json=body | demand, headers=bearer("bob"))
        assert response.status_code == 200 and grammar_askers == ["bob"]

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("completions", {"prompt": "Hi", "structured_outputs": {"regex": "a"}}),
            ("chat/completions", {"messages": CHAT, "structured_outputs": {"regex": "a"}}),
            ("chat/completions/render", {"messages": CHAT, "structured_outputs": {"regex": "a"}}),
            ("responses", {"input": "Hi", "text": {"format": {"type": "json_object"}}}),
            ("messages", {"messages": CHAT, "max_tokens": 9, "output_config": {"format": ANY_OBJECT}}),
        ],
    )
    def test_without_keys_grammars_are_tried_in_the_name_of_the_address(
        self, server: LiveServer, path: str, body: dict[str, Any], grammar_askers: list[str]
    ) -> None:
        for source in ("127.0.0.1", "127.0.0.2"):
            with httpx.Client(transport=httpx.HTTPTransport(local_address=source)) as client:
                assert client.post(f"{server.url}/v1/{path}", json=body).status_code == 200
        assert grammar_askers == ["peer 127.0.0.1", "peer 127.0.0.2"]

    def test_without_keys_there_is_one_tenant(self, server: LiveServer) -> None:
        server.complete("Hi")
        assert server.engine.requests[0].quota_tenant == server.engine.last_tenant_checked == SOLE_TENANT

    def test_prefixes_are_shared_only_when_configured(self, tmp_path: Path) -> None:
        with live_server(api_keys_file=write(tmp_path), share_prefix_cache=True) as server:
            assert [salt for *_, salt in requests_of(server, cache_salt="s")] == ["s", "s"]

    def test_without_keys_the_salt_is_the_requests(self, server: LiveServer) -> None:
        server.complete("Hi", cache_salt="s")
        assert [(request.tenant, request.cache_salt) for request in server.engine.requests] == [("", "s")]

    def test_a_key_has_no_more_requests_at_once_than_it_may(self, keyed: LiveServer) -> None:
        keyed.engine.hold_at = 3
        threads = [in_thread(lambda: keyed.complete("Hi", bearer("alice"), stream=True)) for _ in range(2)]
        keyed.wait_until(lambda: keyed.engine.num_holding == 2)
        refused = keyed.complete("Hi", bearer("alice"))
        assert (refused.status_code, error_of(refused)["code"]) == (429, "slow_down")
        assert "'alice' may have 2" in error_of(refused)["message"] and refused.headers["retry-after"] == "1"
        assert keyed.client.get("/v1/models", headers=bearer("alice")).status_code == 200
        keyed.engine.hold_at = None
        for thread in threads:
            thread.join()
        assert keyed.complete("Hi", bearer("alice")).status_code == 200

    @pytest.mark.parametrize(("fields", "param"), [({"n": 6}, "n"), ({"prompt": ["Hi"] * 6}, "prompt")])
    def test_one_request_for_more_than_its_key_can_have_is_400_and_not_429(
        self, fields: dict[str, Any], param: str
    ) -> None:
        with live_server(api_key=["first-key", "second-key"], max_num_seqs=2, max_waiting=4) as server:
            header = {"Authorization": "Bearer first-key"}
            refused = server.complete(**{"prompt": "Hi", **fields}, headers=header)
            assert (refused.status_code, error_of(refused)["param"]) == (400, param)
            assert "than the 5 that" in error_of(refused)["message"]
            assert server.complete("Hi", header, n=5, max_tokens=1).status_code == 200

    def test_what_a_key_used_is_counted_under_its_name(self, tmp_path: Path) -> None:
        def act() -> None:
            server.complete("Hi", bearer("alice"), max_tokens=5)
            server.complete("Hi", bearer("bob"), max_tokens=7, stream=True)
            server.complete("Hi", bearer("bob"), model="other")
            server.complete("Hi")

        with live_server(api_keys_file=write(tmp_path), key_metrics=True) as server:
            advanced = advance(server, act)
        assert [advanced("twostep_key_requests_total", key=name) for name in SECRETS] == [1, 2]
        assert [advanced("twostep_key_tokens_total", key=name, kind="prompt") for name in SECRETS] == [3, 3]
        assert [advanced("twostep_key_tokens_total", key=name, kind="generated") for name in SECRETS] == [5, 7]
        assert advanced("twostep_key_rejections_total", key="bob", reason="model_not_found") == 1

    def test_requests_without_a_key_have_no_label(self, tmp_path: Path) -> None:
        with live_server(api_keys_file=write(tmp_path), key_metrics=True) as server:
            server.complete("Hi", {"Authorization": "Bearer wrong"})
            assert "twostep_key_requests_total{" not in server.client.get("/metrics").text

    @pytest.mark.parametrize(
        ("sender", "shows_all", "seen"), [("", False, ""), ("bob", False, "bob"), ("", True, "alice bob")]
    )
    def test_metrics_by_key_are_for_that_key(self, tmp_path: Path, sender: str, shows_all: bool, seen: str) -> None:
        with live_server(api_keys_file=write(tmp_path), key_metrics=shows_all) as server:
            for name in SECRETS:
                server.complete("Hi", bearer(name))
                server.complete("Hi", bearer(name), model="other")
            server.wait_until_idle()
            text = server.client.get("/metrics", headers=bearer(sender) if sender else {}).text
        for family in ("requests", "tokens", "rejections"):
            samples = parse(text)[f"twostep_key_{family}"].samples
            assert {sample.labels["key"] for sample in samples} == {*seen.split()}
        assert not [name for name in SECRETS if name not in seen and name in text]
        assert "twostep_generation_tokens_total 0" not in text

    def test_metrics_refuse_a_wrong_key(self, keyed: LiveServer) -> None:
        assert keyed.client.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert keyed.client.get("/metrics", headers={"Authorization": "Basic YTpi"}).status_code == 200
        assert keyed.client.get("/health", headers={"Authorization": "Bearer wrong"}).status_code == 200


@pytest.mark.parametrize("key", ["voilà", "drogą"])
@pytest.mark.parametrize("name", ["Authorization", "x-api-key"])
def test_a_key_may_have_any_letters(key: str, name: str) -> None:
    """The last bytes of these keys, 0xA0 and 0x85, are white space in latin-1."""
    value = f"Bearer  {key}" if name == "Authorization" else key
    with live_server(api_key=[key]) as server:
        assert server.client.get("/v1/models", headers={name: value.encode()}).status_code == 200
        assert server.client.get("/v1/models", headers={name: value[:-1].encode()}).status_code == 401


def test_a_key_is_its_bytes_whatever_the_locale() -> None:
    program = (
        "import sys; from server.auth.api_keys import plain_keys; print(plain_keys((sys.argv[1],))[0].digest.hex())"
    )
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", program, "schlüssel".encode()]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == hashlib.sha256("schlüssel".encode()).hexdigest()


def test_a_key_that_is_no_text_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match="must not contain lone surrogates"):
        plain_keys(("a\ud800",))


def test_a_place_is_free_before_the_client_knows_that_its_response_is_complete(tmp_path: Path) -> None:
    ring = KeyRing(path=write(tmp_path, FILE.replace("max-concurrent: 2", "max-concurrent: 1")))
    free: list[bool] = []

    async def send(message: Message) -> None:
        try:
            with ring.under_way(key):
                free.append(True)
        except OverloadedError:
            free.append(False)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        raise AssertionError

    key = ring.find(b"sk-alice")
    assert key is not None
    headers = [(b"authorization", b"Bearer sk-alice")]
    scope: Scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": headers}
    attach_record(scope, RequestRecord("r", 0.0))
    asyncio.run(AuthMiddleware(app, ring)(scope, receive, send))
    assert free == [False, False, True]
