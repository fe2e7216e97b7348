"""The view of what happens, in a real browser."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from engine.core.batch import Phase
from engine.core.stats import StepShare
from tests.server.fake_engine import saying
from tests.server.live_server import FakeBackend, LiveServer, in_thread, live_server, wait_until
from tests.server.metrics.steps import step

pytestmark = pytest.mark.slow


def test_it_says_what_it_is_a_view_of(server: LiveServer, open_page: Callable[..., Any]) -> None:
    page = open_page(server.url)
    wait_until(lambda: page.title() == "fake")
    facts = page.locator("#facts").inner_text()
    assert "FakeForCausalLM" in facts and "cpu, float32" in facts and "context of 512 tokens" in facts


def test_a_request_is_shown_with_its_progress_and_can_be_ended(
    server: LiveServer, open_page: Callable[..., Any]
) -> None:
    server.engine.hold_at = 3
    client = in_thread(lambda: server.complete("Hi", headers={"X-Request-Id": "odd/<b>id"}, max_tokens=9))
    server.wait_until(lambda: server.engine.num_holding == 1)
    page = open_page(server.url)
    request = page.locator("#requests .request")
    request.wait_for()
    assert request.locator(".id").inner_text() == "odd/<b>id" and request.locator(".phase").inner_text() == "decode"
    request.locator(".id").click()
    wait_until(lambda: "3 tokens" in request.locator(".facts").inner_text())
    page.wait_for_timeout(1200)  # it stays open, and focused, when it is updated
    end = page.get_by_role("button", name="End request odd/<b>id")
    end.focus()
    page.wait_for_timeout(1200)
    assert request.locator(".facts").is_visible() and end.evaluate("element => element === document.activeElement")
    page.keyboard.press("Enter")
    client.join(20)
    wait_until(lambda: page.locator("#num-live").inner_text() == "None runs or waits.")
    server.wait_until_idle()
    page.locator("#ended .id").first.click()
    wait_until(lambda: "1.00 ms" in page.locator("#ended .facts").first.inner_text())
    assert page.locator("#ended .phase").first.inner_text() == "length"


def test_requests_of_other_keys_are_not_shown(open_page: Callable[..., Any]) -> None:
    with live_server(api_key=["mine", "theirs"]) as server:
        server.engine.hold_at = 1
        client = in_thread(lambda: server.complete("Hi", headers={"Authorization": "Bearer theirs"}))
        server.wait_until(lambda: server.engine.num_holding == 1)
        page = open_page(server.url)
        page.wait_for_selector("#key")
        page.fill("#key", "mine")
        page.press("#key", "Enter")
        page.locator("#tiles dd").first.wait_for()
        assert page.locator(".request").count() == 0
        assert page.locator("#num-live").inner_text() == "None runs or waits."
        server.call(lambda: setattr(server.engine, "hold_at", None))
        client.join(20)


def test_a_server_that_loads_or_is_gone_is_told_until_it_answers(open_page: Callable[..., Any]) -> None:
    backend = FakeBackend(is_loading=True)
    with live_server(backend) as server:
        page = open_page(server.url)
        wait_until(lambda: "loading" in page.locator("#trouble").text_content())
        backend.is_loading = False
        wait_until(lambda: page.title() == "fake")
        wait_until(lambda: page.is_hidden("#trouble"))
    wait_until(lambda: "does not answer" in page.locator("#trouble").text_content())
    page.close()


def test_the_chart_tells_its_values_to_the_keyboard(server: LiveServer, open_page: Callable[..., Any]) -> None:
    server.engine.rule = saying("Hello")
    page = open_page(server.url)
    page.wait_for_timeout(3500)
    chart = page.locator("#rates svg")
    assert all(each in chart.text_content() for each in ("0/s", "5 min ago", "now"))
    chart.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#rates .cross").count() == 1
    assert "s ago" in page.locator("#rates .legend").inner_text()


def test_steps_tell_who_ran_in_them(server: LiveServer, open_page: Callable[..., Any]) -> None:
    server.engine.hold_at = 2
    client = in_thread(lambda: server.complete("Hi", headers={"X-Request-Id": "me"}))
    server.wait_until(lambda: server.engine.num_holding == 1)
    page = open_page(server.url)
    page.locator("#requests .request").wait_for()
    shares = [StepShare("", "me", 3, 90), StepShare("theirs", "them", 0, 12)]
    prefill = step(Phase.PREFILL, time.monotonic(), 0.05, num_tokens=99)
    server.call(lambda: server.context.metrics.on_step(prefill, shares))
    decode = step(Phase.DECODE, time.monotonic(), 0.02, held=5)
    server.call(lambda: server.context.metrics.on_step(decode, [StepShare("theirs", "them", 12, 13)]))
    legend = page.locator("#lanes .legend")
    wait_until(lambda: "decode step of 8 tokens, 2 requests, 20.0 ms" in legend.inner_text())
    text = legend.inner_text()
    assert "50 % of the KV cache held, 27 % of what the machine could do, bound by memory" in text
    assert "ran: " not in text
    timeline = page.locator("#lanes svg")
    timeline.focus()
    page.check("#hold")
    timeline.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert "prefill step of 99 tokens" in legend.inner_text() and "ran: me" in legend.inner_text()
    page.keyboard.press("Enter")
    table = page.locator("#ran table")
    assert "1 sequence of other API keys" in table.inner_text() and "them" not in table.inner_text()
    assert table.locator("tbody tr").all_inner_texts() == ["me\t87 tokens\t3 to 89\t1"]
    for _ in range(2):  # to the table, and to the name in it
        page.keyboard.press("Tab")
    page.wait_for_timeout(1200)  # it stays focused when the page looks again
    page.keyboard.press("Enter")
    wait_until(lambda: page.locator("#requests details[open]").count() == 1)
    assert page.evaluate("document.activeElement.textContent").startswith("me")
    wait_until(lambda: "faint: steps without me" in legend.inner_text())
    faint = {name: page.locator(f"#lanes .ink-{name}.faint").get_attribute("d") for name in ("prefill", "decode")}
    assert faint["prefill"] == "M0 0" != faint["decode"]
    page.uncheck("#hold")
    assert page.is_hidden("#ran")
    server.call(lambda: setattr(server.engine, "hold_at", None))
    client.join(20)


def test_slow_to_start_or_slow_to_stream_is_answered(server: LiveServer, open_page: Callable[..., Any]) -> None:
    server.complete("Hi", max_tokens=5)
    page = open_page(server.url)
    wait_until(
        lambda: page.locator("#sentence").inner_text().startswith("Neither: nine answers in ten begin within 3.0 ms")
    )
    assert page.locator("#evidence li").count() >= 2 and page.is_hidden("#help")
    assert "prefill 2.00 ms" in page.locator("#shares").inner_text()


def test_bugs_of_the_page_are_told(server: LiveServer, chromium: Any) -> None:
    page = chromium.new_page()
    page.goto(server.url)
    page.evaluate("setTimeout(() => { throw new Error('boom') })")
    wait_until(lambda: "boom" in page.locator("#trouble").text_content())
    page.evaluate("Promise.reject(new Error('crash')), null")
    wait_until(lambda: "crash" in page.locator("#trouble").text_content())
    page.close()
