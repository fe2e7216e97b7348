"""Both views at the widths of telephones, tablets and desktops, light and dark: for every reader, on every screen."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from engine.core.batch import Phase
from engine.core.stats import StepShare
from tests.server.fake_engine import saying
from tests.server.live_server import LiveServer, in_thread, wait_until
from tests.server.metrics.steps import step

pytestmark = pytest.mark.slow

WIDTHS = (360, 768, 1280)


@pytest.fixture(params=[(width, scheme) for width in WIDTHS for scheme in ("light", "dark")], ids=str)
def screen(request: pytest.FixtureRequest) -> tuple[int, str]:
    found: tuple[int, str] = request.param
    return found


def assert_fits(page: Any, width: int) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_live_view(
    server: LiveServer, open_page: Callable[..., Any], screen: tuple[int, str], violations: Callable[[Any], list[str]]
) -> None:
    server.complete("Hi", max_tokens=3)
    server.engine.hold_at = 3
    client = in_thread(lambda: server.complete("Hi", headers={"X-Request-Id": "x" * 128}))
    page = open_page(server.url, *screen)
    prefill, share = step(Phase.PREFILL, time.monotonic(), 0.5, num_tokens=99), StepShare("", "x" * 128, 0, 90)
    server.call(lambda: server.context.metrics.on_step(prefill, [share]))
    wait_until(lambda: "prefill step" in page.locator("#lanes .legend").inner_text())
    page.locator("#lanes svg").focus()
    for key in ("ArrowLeft", "Enter"):  # on the newest step
        page.keyboard.press(key)
    page.locator("#ran button").wait_for()
    assert page.is_checked("#hold")
    for place in ("#requests", "#ended"):
        page.locator(f"{place} .id").first.click()
        page.wait_for_selector(f"{place} .facts dd")
    assert_fits(page, screen[0])
    assert violations(page) == []
    server.call(lambda: setattr(server.engine, "hold_at", None))
    client.join(20)


def test_the_playground(
    server: LiveServer, open_page: Callable[..., Any], screen: tuple[int, str], violations: Callable[[Any], list[str]]
) -> None:
    server.engine.rule = saying("W" * 200)
    page = open_page(f"{server.url}/#playground", *screen)
    page.fill("#message", "M" * 200)
    page.press("#message", "Enter")
    page.wait_for_selector(".timings")
    page.locator(".token").first.hover()
    page.locator("summary", has_text="Tools").click()
    assert_fits(page, screen[0])
    assert violations(page) == []


def test_a_conversation_needs_no_pointer(server: LiveServer, open_page: Callable[..., Any]) -> None:
    server.engine.rule = saying("Yes")
    page = open_page(server.url)
    wait_until(lambda: page.title() == "fake")
    for _ in range(2):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # on the link to the playground
    page.locator("#message").wait_for()
    for _ in range(2):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("Hi")
    page.keyboard.press("Enter")
    page.wait_for_selector(".timings")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").inner_text().startswith("Y")
