"""The page of /docs, in a real browser."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.live_server import LiveServer, live_server, wait_until

pytestmark = pytest.mark.slow


def opened(page: Any, method: str, path: str) -> Any:
    """Opens an operation, and returns its element."""
    summary = page.locator(".operation > summary").filter(has=page.get_by_text(path, exact=True))
    summary = summary.filter(has=page.get_by_text(method, exact=True))
    summary.click()
    return summary.locator("..")


def test_all_operations_are_shown(server: LiveServer, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{server.url}/docs")
    page.locator(".operation").first.wait_for()
    described = server.client.get("/openapi.json").json()["paths"]
    assert page.locator(".operation").count() == sum(len(operations) for operations in described.values())


def test_fields_are_shown_with_types_and_what_they_hold(server: LiveServer, open_page: Callable[..., Any]) -> None:
    operation = opened(open_page(f"{server.url}/docs"), "POST", "/v1/chat/completions")
    operation.get_by_text("number from 0 to 2 or null").first.wait_for()
    text = operation.inner_text()
    assert "required" in text and "429" in text
    operation.get_by_text("UserMessage", exact=True).click()
    operation.locator("details[open] code", has_text="content").first.wait_for()


def test_every_operation_can_be_opened_with_all_that_is_in_it(
    server: LiveServer, open_page: Callable[..., Any]
) -> None:
    page = open_page(f"{server.url}/docs")
    page.locator(".operation").first.wait_for()
    for _ in range(3):
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        page.wait_for_timeout(300)
    assert page.locator("dl.fields").count() > 300 and "undefined" not in page.locator("main").inner_text()


def test_search_finds_parameters(server: LiveServer, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{server.url}/docs")
    page.locator(".operation").first.wait_for()
    page.fill("#words", "count_tokens")
    assert page.locator(".operation:visible").count() == 1
    page.fill("#words", "xyzzy")
    assert page.locator(".operation:visible").count() == 0 and page.is_visible("#nothing")
    page.fill("#words", "max_tokens COMPLETIONS")
    assert page.locator(".operation:visible code", has_text="/v1/completions").count() == 1


def test_requests_can_be_tried(server: LiveServer, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{server.url}/docs")
    operation = opened(page, "POST", "/tokenize")
    operation.locator(".try textarea").fill('{"prompt": "<b>"}')
    operation.get_by_role("button", name="Send").click()
    wait_until(lambda: '"count": 4' in operation.locator(".result").inner_text())
    operation.locator(".try textarea").fill("{}")
    operation.get_by_role("button", name="Send").click()
    wait_until(lambda: operation.locator(".result").inner_text().startswith("400\n"))
    operation = opened(page, "GET", "/v1/models/{name}")
    operation.get_by_label("name").fill("fake")
    operation.get_by_role("button", name="Send").click()
    wait_until(lambda: operation.locator(".result").inner_text().startswith("200\n"))


def test_the_key_is_asked_for(open_page: Callable[..., Any]) -> None:
    with live_server(api_key=["secret"]) as server:
        page = open_page(f"{server.url}/docs")
        page.locator("#key").wait_for()
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        page.locator(".operation").first.wait_for()
        assert page.is_hidden("#trouble")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_it_fits_and_is_for_every_reader(
    server: LiveServer, open_page: Callable[..., Any], width: int, scheme: str, violations: Callable[[Any], list[str]]
) -> None:
    page = open_page(f"{server.url}/docs", width, scheme)
    opened(page, "POST", "/v1/completions")
    opened(page, "GET", "/v1/requests/{id}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert violations(page) == []
