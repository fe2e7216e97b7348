"""POST /reset_prefix_cache reaches the engine, and one client's cache is not another's to forget."""

from pathlib import Path

import pytest

from tests.server.auth.key_files import bearer, write
from tests.server.events import error_of
from tests.server.live_server import LiveServer, live_server


@pytest.mark.parametrize(("query", "clears_store"), [("", False), ("?reset_external=true", True)])
def test_the_engine_is_told(server: LiveServer, query: str, clears_store: bool) -> None:
    response = server.client.post(f"/reset_prefix_cache{query}")
    assert (response.status_code, response.json()) == (200, {"success": True})
    assert server.engine.resets == [clears_store]


def test_running_requests_are_not_reset(server: LiveServer) -> None:
    response = server.client.post("/reset_prefix_cache?reset_running_requests=true")
    assert (response.status_code, error_of(response)["param"]) == (400, "reset_running_requests")
    assert server.engine.resets == []


def test_without_an_engine_nothing_can_be_reset(server: LiveServer) -> None:
    server.engine.is_ready = False
    assert server.client.post("/reset_prefix_cache").status_code == 503


def test_one_of_several_keys_may_not_reset_it(tmp_path: Path) -> None:
    with live_server(api_keys_file=write(tmp_path)) as server:
        response = server.client.post("/reset_prefix_cache", headers=bearer("alice"))
        assert response.status_code == 400 and "none of several" in response.text
        assert server.client.post("/reset_prefix_cache").status_code == 401
        assert server.engine.resets == []


def test_the_only_key_may(tmp_path: Path) -> None:
    with live_server(api_key=("secret",)) as server:
        headers = {"Authorization": "Bearer secret"}
        assert server.client.post("/reset_prefix_cache", headers=headers).status_code == 200
        assert server.engine.resets == [False]
