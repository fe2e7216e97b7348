"""GET and DELETE /v1/cache tell of and drop an API key's own, and requests say what is to be retained."""

from pathlib import Path
from typing import Any

import pytest

from engine.core.cache_steering import CachedPrefixes, CacheSteering
from tests.server.auth.key_files import bearer, write
from tests.server.events import error_of
from tests.server.live_server import LiveServer, live_server

CHAT = [{"role": "user", "content": "Hi"}]
KEYS = {"": [CachedPrefixes("k", 64, 48, 32, 16, 2.5, 10.0), CachedPrefixes("", 16, 16, 0, 0, 1.0, 0.0)]}
SEND = {
    "completions": {"prompt": "Hi"},
    "chat/completions": {"messages": CHAT},
    "responses": {"input": "Hi"},
    "messages": {"messages": CHAT, "max_tokens": 9},
    "embeddings": {"input": "Hi"},
}


def steering(server: LiveServer, path: str, **fields: Any) -> CacheSteering:
    response = server.post_json(f"/v1/{path}", {**SEND[path], **fields})
    assert response.status_code == 200, response.text
    return server.engine.requests[-1].steering


def test_keys_are_listed_the_newest_first(server: LiveServer) -> None:
    server.engine.cached = KEYS
    body = server.client.get("/v1/cache").json()
    assert (body["object"], body["has_more"]) == ("list", False)
    assert [entry["prompt_cache_key"] for entry in body["data"]] == [None, "k"]
    assert body["data"][1] == {
        "prompt_cache_key": "k",
        "object": "cache_key",
        "tokens": 64,
        "memory_tokens": 48,
        "disk_tokens": 32,
        "retained_tokens": 16,
        "idle_ms": 2500.0,
        "retained_ms": 10000.0,
    }


@pytest.mark.parametrize(("key", "shown"), [("k", ["k"]), ("", [None]), ("other", [])])
def test_one_key_is_listed(server: LiveServer, key: str, shown: list[str | None]) -> None:
    server.engine.cached = KEYS
    body = server.client.get("/v1/cache", params={"prompt_cache_key": key}).json()
    assert [entry["prompt_cache_key"] for entry in body["data"]] == shown


def test_a_thousand_keys_are_listed_at_most(server: LiveServer) -> None:
    server.engine.cached = {"": [CachedPrefixes(str(index), 16, 16, 0, 0, index, 0.0) for index in range(1001)]}
    body = server.client.get("/v1/cache").json()
    assert (len(body["data"]), body["data"][0]["prompt_cache_key"], body["has_more"]) == (1000, "0", True)


@pytest.mark.parametrize(("query", "key"), [("", None), ("?prompt_cache_key=k", "k"), ("?prompt_cache_key=", "")])
def test_the_engine_drops_what_is_asked_for(server: LiveServer, query: str, key: str | None) -> None:
    response = server.client.delete(f"/v1/cache{query}")
    assert response.json() == {"prompt_cache_key": key, "object": "cache_key", "deleted": True}
    assert server.engine.drops == [("", key)]


def test_an_api_key_sees_and_drops_its_own(tmp_path: Path) -> None:
    with live_server(api_keys_file=write(tmp_path)) as server:
        server.engine.cached = {"alice": KEYS[""]}
        listed = [server.client.get("/v1/cache", headers=bearer(name)).json()["data"] for name in ("alice", "bob")]
        assert [len(each) for each in listed] == [2, 0]
        server.client.delete("/v1/cache", headers=bearer("bob"))
        assert server.engine.drops == [("bob", None)]
        assert server.client.get("/v1/cache").status_code == server.client.delete("/v1/cache").status_code == 401


def test_without_an_engine_nothing_is_told_and_nothing_dropped(server: LiveServer) -> None:
    server.engine.is_ready = False
    assert server.client.get("/v1/cache").status_code == server.client.delete("/v1/cache").status_code == 503
    assert server.engine.drops == []


@pytest.mark.parametrize("path", SEND)
def test_every_endpoint_takes_key_and_retention(server: LiveServer, path: str) -> None:
    assert steering(server, path) == CacheSteering()
    asked = steering(server, path, prompt_cache_key="k", prompt_cache_retention="24h")
    assert asked == CacheSteering("k", 86400.0)
    for spelling in ("in_memory", "in-memory"):
        assert steering(server, path, prompt_cache_retention=spelling) == CacheSteering(stays_in_memory=True)
    longest = steering(server, path, prompt_cache_retention="24h", prompt_cache_options={"ttl": "30m"})
    assert longest.retain_s == 86400.0


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_key": "k" * 1025},
        {"prompt_cache_key": 7},
        {"prompt_cache_retention": "48h"},
        {"prompt_cache_options": {"ttl": "2m"}},
    ],
)
def test_what_no_retention_can_be_is_refused_by_name(server: LiveServer, fields: dict[str, Any]) -> None:
    response = server.complete("Hi", **fields)
    assert response.status_code == 400 and (error_of(response)["param"] or "").startswith(*fields)
