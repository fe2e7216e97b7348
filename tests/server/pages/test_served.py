"""What the pages are on the wire: one file each, that runs nothing but its own script."""

import base64
import hashlib
import re
from pathlib import Path

import httpx
import pytest

from server.middleware.auth import KEYLESS_PATHS
from tests.server.live_server import FakeBackend, live_server

SOURCES = Path(__file__).resolve().parents[3] / "server" / "page"


@pytest.fixture(scope="module", params=["/", "/docs"])
def page(request: pytest.FixtureRequest) -> httpx.Response:
    with live_server(FakeBackend(is_loading=True), api_key=["secret"]) as server:
        return server.client.get(request.param)


def test_it_needs_no_key_and_no_model(page: httpx.Response) -> None:
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"


def test_it_loads_nothing_and_makes_no_html_of_texts(page: httpx.Response) -> None:
    assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", page.text)
    assert not re.search(r"<script .|<link|<img|<iframe|@import|url\(| style=| on\w+=", page.text)


def test_the_policy_allows_its_own_style_and_script_alone(page: httpx.Response) -> None:
    policy = dict(each.split(" ", 1) for each in page.headers["content-security-policy"].split("; "))
    for name in ("style", "script"):
        (text,) = re.findall(rf"<{name}>(.*?)</{name}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert text and policy[f"{name}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'" and policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in page.headers["content-security-policy"]


def test_what_it_asks_for_exists_and_wants_the_key(page: httpx.Response) -> None:
    paths = set(re.findall(r'get\("([^"]+)"\)', page.text))
    assert paths >= {"openapi.json"} or paths >= {"load", "stats", "v1/requests", "v1/models", "server_info"}
    with live_server(api_key=["secret"]) as server:
        for path in paths:
            assert server.client.get(f"/{path}").status_code == (200 if f"/{path}" in KEYLESS_PATHS else 401)
            assert server.client.get(f"/{path}", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_its_sources_fit_a_reader() -> None:
    sources = {path.name: path.read_text(encoding="utf-8").splitlines() for path in SOURCES.iterdir()}
    assert sources and {name for name, lines in sources.items() if len(lines) > 250} == set()
    assert [line for lines in sources.values() for line in lines if len(line) > 120] == []
