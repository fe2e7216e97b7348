"""Keys with names: what the file may say, who is let in, on which terms, and what is counted."""

import asyncio
import hashlib
import logging
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from engine.client import SOLE_TENANT, Tenant
from engine.errors import ConfigError, OverloadedError
from engine.grammar_checker import GrammarChecker
from server.api_keys import NOBODY, ApiKey, new_key, read_keys
from server.cli import main
from server.key_ring import KeyRing
from server.middleware.auth import AuthMiddleware
from server.record import RequestRecord, attach_record
from tests.server.events import error_of
from tests.server.live_server import LiveServer, live_server
from tests.server.test_lifecycle import in_thread
from tests.server.test_metrics import advance

SECRETS = {"alice": "sk-alice", "bob": "sk-bob"}
HASHES = {name: hashlib.sha256(secret.encode()).hexdigest() for name, secret in SECRETS.items()}
FILE = f"""
alice:
  sha256: "{HASHES["alice"]}"
  weight: 2
  max-concurrent: 2
bob: {{sha256: "{HASHES["bob"].upper()}"}}
"""


def write(tmp_path: Path, content: str = FILE) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(content)
    return path


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {SECRETS[name]}"}


class TestFile:
    def test_each_entry_is_a_key(self, tmp_path: Path) -> None:
        assert read_keys(write(tmp_path)) == [
            ApiKey("alice", bytes.fromhex(HASHES["alice"]), 2.0, 2),
            ApiKey("bob", bytes.fromhex(HASHES["bob"]), 1.0, None),
        ]

    def test_an_empty_one_has_none(self, tmp_path: Path) -> None:
        assert read_keys(write(tmp_path, "# nobody\n")) == []

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("alice: 3\n", ["alice"]),
            ("alice: {weight: 2}\n", ["alice.sha256"]),
            (f"alice: {{sha256: {HASHES['bob'][:63]}}}\n", ["alice.sha256"]),
            (f"alice: {{sha256: {HASHES['bob']}x}}\n", ["alice.sha256"]),
            (FILE.replace("weight: 2", "weight: 0"), ["alice.weight", "greater"]),
            (FILE.replace("weight: 2", "weight: .inf"), ["alice.weight"]),
            (FILE.replace("weight: 2", "weigth: 2"), ["alice.weigth"]),
            (FILE.replace("max-concurrent: 2", "max-concurrent: 0"), ["alice.max-concurrent"]),
            (FILE.replace("alice", '"al ice"'), ["al ice"]),
            (FILE.replace("alice", "a" * 65), ["a" * 64]),
            ("- alice\n", ["content"]),
            ("a: [\n", ["not YAML"]),
            (2 * FILE, ["'alice' twice"]),
            (FILE.replace("bob: {", "bob: {weight: 2, weight: 3, "), ["'weight' twice"]),
            ("? [a]\n: 1\n? [b]\n: 2\n", ["not YAML"]),
            ("alice: {sha256: 2024-13-01}\n", ["not YAML"]),
        ],
    )
    def test_what_is_wrong_is_named_and_shows_no_hash(self, tmp_path: Path, content: str, words: list[str]) -> None:
        with pytest.raises(ConfigError) as error:
            read_keys(write(tmp_path, content))
        message = str(error.value)
        assert "\n" not in message and all(word in message for word in ["--api-keys-file", "keys.yaml", *words])
        assert HASHES["bob"][:16] not in message and HASHES["alice"][:16] not in message

    def test_a_missing_one_is_told(self) -> None:
        with pytest.raises(ConfigError, match="No such file"):
            KeyRing(path=Path("/nowhere/keys.yaml"))

    def test_a_name_is_that_of_one_key(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="default"):
            KeyRing(("one",), write(tmp_path, FILE.replace("bob", "default")))


class TestNewKeys:
    def test_the_command_prints_an_entry_and_apart_from_it_the_key(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["key", "carol"]) == 0
        shown = capsys.readouterr()
        secret = shown.err.split()[-1]
        ring = KeyRing(path=write(tmp_path, FILE + shown.out))
        found = ring.find(secret.encode())
        assert found is not None and found.name == "carol" and secret not in shown.out

    def test_they_cannot_be_guessed(self) -> None:
        secrets = {new_key("carol")[0] for _ in range(100)}
        assert len(secrets) == 100 and all(len(secret) >= 43 for secret in secrets)

    @pytest.mark.parametrize("name", ["", "a b", "a: b", "#", "x" * 65, "-", "2024-02-30"])
    def test_their_names_are_checked(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(ConfigError, match="cannot name a key"):
            new_key(name)


class TestRing:
    def test_a_key_is_found_by_all_of_it(self, tmp_path: Path) -> None:
        ring = KeyRing(("one", "two"), write(tmp_path))
        names = [found and found.name for found in map(ring.find, (b"one", b"two", b"sk-alice", b"sk-bob"))]
        assert names == ["key-1", "key-2", "alice", "bob"]
        for wrong in (b"", b"on", b"onetwo", b"sk-alic", bytes.fromhex(HASHES["bob"]), HASHES["bob"].encode()):
            assert ring.find(wrong) is None

    def test_one_plain_key_is_the_default(self) -> None:
        found = KeyRing(("one",)).find(b"one")
        assert found is not None and found.name == "default"

    def test_it_is_open_only_without_any(self, tmp_path: Path) -> None:
        rings = [KeyRing(), KeyRing(("one",)), KeyRing(path=write(tmp_path, ""))]
        assert [ring.is_open for ring in rings] == [True, False, False]

    def test_a_file_that_changed_is_in_force_when_read_again(self, tmp_path: Path) -> None:
        ring = KeyRing(("one",), write(tmp_path))
        write(tmp_path, FILE.replace(HASHES["alice"], HASHES["bob"][::-1]))
        assert ring.find(b"sk-alice") is not None
        ring.reload()
        assert ring.find(b"sk-alice") is None and ring.find(b"sk-bob") is not None and ring.find(b"one") is not None

    def test_shares_are_parts_of_all_weights(self, tmp_path: Path) -> None:
        ring = KeyRing(("one",), write(tmp_path))
        found = [ring.find(secret) for secret in (b"one", b"sk-alice", b"sk-bob")]
        assert [key and ring.share_of(key) for key in found] == [0.25, 0.5, 0.25]
        assert ring.share_of(ApiKey("gone", b"", weight=100.0)) == 1.0
        assert KeyRing().share_of(NOBODY) == 1.0

    def test_a_file_that_is_wrong_changes_nothing(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        ring = KeyRing(path=write(tmp_path))
        write(tmp_path, "alice: 3\n")
        with caplog.at_level(logging.ERROR):
            ring.reload()
        assert ring.find(b"sk-alice") is not None and "stay as they were" in caplog.text

    def test_no_key_has_more_under_way_than_it_may(self) -> None:
        ring, key, other = KeyRing(), ApiKey("a", b"", max_concurrent=2), ApiKey("b", b"", max_concurrent=1)
        with ring.under_way(key), ring.under_way(other):
            with (
                ring.under_way(key),
                pytest.raises(OverloadedError, match="'a' may have 2 requests at once"),
                ring.under_way(key),
            ):
                pass
            with ring.under_way(key):
                pass

    def test_nobody_has_no_limit(self) -> None:
        ring = KeyRing()
        with ExitStack() as all_of_them:
            for _ in range(1000):
                all_of_them.enter_context(ring.under_way(NOBODY))


@pytest.mark.parametrize(("one", "other"), [("a", "b"), ("a", "ab"), ("", "a")])
def test_salts_of_two_keys_never_meet(one: str, other: str) -> None:
    salts = ["", "a", "b", "ab"]
    assert not {ApiKey(one, b"").salt(salt) for salt in salts} & {ApiKey(other, b"").salt(salt) for salt in salts}
    assert len({ApiKey(one, b"").salt(salt) for salt in salts}) == 4


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

    def test_the_engine_knows_who_asks_and_prefixes_are_apart(self, keyed: LiveServer) -> None:
        assert requests_of(keyed, cache_salt="s") == [("alice", 2.0, "alice\0s"), ("bob", 1.0, "bob\0s")]

    def test_the_room_is_asked_in_the_name_of_the_key(self, keyed: LiveServer) -> None:
        requests_of(keyed)
        assert [request.who for request in keyed.engine.requests] == [Tenant("alice", 2 / 3), Tenant("bob", 1 / 3)]
        assert keyed.engine.tenant_at_door == Tenant("bob", 1 / 3)

    @pytest.mark.parametrize(
        ("path", "body"),
        [("completions", {"prompt": "Hi"}), ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})],
    )
    def test_grammars_are_tried_in_the_name_of_the_key(
        self, keyed: LiveServer, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked, check = list[str](), GrammarChecker.check

        async def remember(checker: GrammarChecker, grammar: str, tenant: str = "") -> None:
            asked.append(tenant)
            await check(checker, grammar, tenant)

        monkeypatch.setattr(GrammarChecker, "check", remember)
        demand = {"structured_outputs": {"choice": ["a", "b"]}, "max_tokens": 1}
        response = keyed.client.post(f"/v1/{path}", json=body | demand, headers=bearer("bob"))
        assert response.status_code == 200 and asked == ["bob"]

    def test_without_keys_there_is_one_tenant(self, server: LiveServer) -> None:
        server.complete("Hi")
        assert server.engine.requests[0].who == server.engine.tenant_at_door == SOLE_TENANT

    def test_prefixes_are_shared_only_when_told(self, tmp_path: Path) -> None:
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
    def test_one_request_for_more_than_its_key_can_have_is_never_told_to_come_back(
        self, fields: dict[str, Any], param: str
    ) -> None:
        with live_server(api_key=["first-key", "second-key"], max_num_seqs=2, max_waiting=4) as server:
            header = {"Authorization": "Bearer first-key"}
            refused = server.complete(**{"prompt": "Hi", **fields}, headers=header)
            assert (refused.status_code, error_of(refused)["param"]) == (400, param)
            assert "than the 5 that" in error_of(refused)["message"]
            assert server.complete("Hi", header, n=5, max_tokens=1).status_code == 200

    def test_what_a_key_used_is_counted_under_its_name(self, keyed: LiveServer) -> None:
        def act() -> None:
            keyed.complete("Hi", bearer("alice"), max_tokens=5)
            keyed.complete("Hi", bearer("bob"), max_tokens=7, stream=True)
            keyed.complete("Hi", bearer("bob"), model="other")
            keyed.complete("Hi")

        advanced = advance(keyed, act)
        assert [advanced("twostep_key_requests_total", key=name) for name in SECRETS] == [1, 2]
        assert [advanced("twostep_key_tokens_total", key=name, kind="prompt") for name in SECRETS] == [3, 3]
        assert [advanced("twostep_key_tokens_total", key=name, kind="generated") for name in SECRETS] == [5, 7]
        assert advanced("twostep_key_rejections_total", key="bob", reason="model_not_found") == 1

    def test_who_has_no_key_is_no_label(self, keyed: LiveServer) -> None:
        keyed.complete("Hi", {"Authorization": "Bearer wrong"})
        assert "twostep_key_requests_total{" not in keyed.client.get("/metrics").text


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


@pytest.mark.parametrize("secret", ["", " ", " key", "key\n"])
def test_a_key_that_nobody_could_send_or_everybody_does_is_refused(secret: str) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        KeyRing(("one", secret))
