"""Behind a prefix of a proxy, which takes it off the paths or leaves it there."""

import re
from collections.abc import Generator
from typing import Any

import pytest

from engine.core.errors import ConfigError
from server.app import create_app
from server.settings.settings import Settings
from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.server.metrics.published_metrics import advance

PREFIX = "/a/llm"
ROUTES = ["/v1/completions", "/v1//completions/", f"{PREFIX}//v1/completions/", f"{PREFIX}{PREFIX}/v1/completions"]


@pytest.fixture(scope="module")
def behind(no_settings_from_outside: None) -> Generator[LiveServer, None, None]:
    with live_server(root_path=PREFIX, api_key=["k"]) as running:
        yield running


@pytest.mark.parametrize("path", ROUTES)
def test_routes_are_there_with_the_prefix_and_without(behind: LiveServer, path: str) -> None:
    def ask() -> None:
        body: dict[str, Any] = {"prompt": "Hi", "max_tokens": 1}
        assert behind.post_json(path, body).status_code == 401
        assert behind.post_json(path, body, {"Authorization": "Bearer k"}).status_code == 200

    handled = {"handler": "/v1/completions", "method": "POST", "status": "200"}
    assert advance(behind, ask)("twostep_http_requests_total", **handled) == 1


@pytest.mark.parametrize("path", ["/health", f"{PREFIX}/health", f"{PREFIX}/", PREFIX, "/"])
def test_keyless_paths_need_no_key_there_either(behind: LiveServer, path: str) -> None:
    assert behind.client.get(path).status_code == 200


@pytest.mark.parametrize("path", [f"{PREFIX}x/health", "/a/health", "/llm/health"])
def test_what_only_looks_like_the_prefix_is_none(behind: LiveServer, path: str) -> None:
    assert behind.client.get(path, headers={"Authorization": "Bearer k"}).status_code == 404


def test_the_page_asks_behind_the_prefix(behind: LiveServer, server: LiveServer) -> None:
    page, plain = behind.client.get(PREFIX), server.client.get("/")
    assert f'<head>\n<base href="{PREFIX}/">' in page.text and "<base" not in plain.text
    policies = [each.headers["content-security-policy"] for each in (page, plain)]
    assert policies[0] == policies[1].replace("base-uri 'none'", "base-uri 'self'") != policies[1]
    assert not re.search(r"""<a href="/|fetch\("/""", plain.text)


def test_the_documentation_asks_behind_the_prefix(behind: LiveServer) -> None:
    key = {"Authorization": "Bearer k"}
    assert f'<base href="{PREFIX}/">' in behind.client.get("/docs", headers=key).text
    described = behind.client.get(f"{PREFIX}/openapi.json", headers=key).json()
    assert described["servers"] == [{"url": PREFIX}] and "/v1/completions" in described["paths"]


@pytest.mark.parametrize("path", ["/v1", "/api", "/v1/chat", "/health"])
def test_a_prefix_that_routes_begin_with_is_refused(path: str) -> None:
    settings = Settings(root_path=path)
    with pytest.raises(ConfigError, match="--root-path"):
        create_app(settings, FakeBackend().opener(settings))


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "//llm", "/a/../b", '/"', "/a b", "/.."])
def test_what_is_no_prefix_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="must be a path"):
        Settings(root_path=path)
