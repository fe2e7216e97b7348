"""The playground in a real browser, over an engine that says what a test wants it to."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.fake_engine import saying
from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.model_talk import prompt_of, saying_tokens
from tests.server.tools.tool_chats import CALL

pytestmark = pytest.mark.slow

HOSTILE = "</div><img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>&amp;"


def ask(page: Any, text: str = "Hi") -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")


def text_of(page: Any) -> Any:
    """Returns the text of the newest answer so far."""
    return (
        page.locator(".turn.assistant > .text").last.text_content() if page.locator(".turn.assistant").count() else None
    )


def ended(page: Any, num_answers: int = 1) -> Any:
    """Waits until so many answers have ended, and returns the newest."""
    answers = page.locator(".turn.assistant:has(.timings)")
    answers.nth(num_answers - 1).wait_for()
    return answers.last


def test_an_answer_is_streamed_and_told_with_its_times(server: LiveServer, open_page: Callable[..., Any]) -> None:
    server.engine.rule, server.engine.hold_at = saying("Hello!"), 3
    page = open_page(f"{server.url}/#playground")
    ask(page)
    wait_until(lambda: text_of(page) == "Hel")
    assert page.is_disabled("#send") and page.is_visible("#stop")
    server.call(lambda: setattr(server.engine, "hold_at", None))
    text = ended(page).inner_text()
    assert "Hello!" in text and "TTFT 3.00 ms (queue 1.00 ms, prefill 2.00 ms)" in text and "ITL 0.50 ms" in text
    assert "7 tokens" in text and "ended: stop" in text


def test_parameters_are_sent_and_what_is_left_empty_is_not(server: LiveServer, open_page: Callable[..., Any]) -> None:
    server.engine.rule = saying("Yes.")
    page = open_page(f"{server.url}/#playground")
    for name, value in {"temperature": "0.5", "top_p": "0.9", "max_tokens": "3", "seed": "7"}.items():
        page.fill(f"#{name}", value)
    page.fill("#system", "Be brief.")
    ask(page, "Is it?")
    ended(page)
    (request,) = server.engine.requests
    params = request.params
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.5, 0.9, 3, 7)
    assert "Be brief." in prompt_of(server)
    for name in ("temperature", "top_p", "max_tokens", "seed"):
        page.fill(f"#{name}", "")
    page.uncheck("#logprobs")
    ask(page, "And now?")
    ended(page, 2)
    params = server.engine.requests[-1].params
    assert params.temperature == 1.0 and params.max_tokens > 3 and params.logprobs is None
    assert "Is it?" in prompt_of(server)


def test_a_parameter_that_is_wrong_is_told_and_nothing_is_sent(
    server: LiveServer, open_page: Callable[..., Any]
) -> None:
    page = open_page(f"{server.url}/#playground")
    page.fill("#temperature", "9")
    ask(page)
    assert "temperature" in page.locator(".failed").inner_text()
    page.fill("#temperature", "")
    page.locator("summary", has_text="Tools").click()
    page.fill("#tools", "[")
    ask(page)
    assert "no JSON" in page.locator(".failed").last.inner_text()
    assert server.engine.requests == []


def test_texts_are_texts_whatever_they_say(server: LiveServer, open_page: Callable[..., Any]) -> None:
    server.engine.rule = saying(HOSTILE)
    page = open_page(f"{server.url}/#playground")
    wait_until(lambda: page.title() == "fake")
    ask(page, HOSTILE)
    answer = ended(page)
    assert answer.locator(".text").last.text_content() == HOSTILE
    assert page.locator(".turn.user .text").text_content() == HOSTILE
    assert page.title() == "fake" and page.locator("main img, main script").count() == 0


def test_stop_ends_the_answer_on_the_server_and_keeps_what_there_is(
    server: LiveServer, open_page: Callable[..., Any]
) -> None:
    server.engine.rule, server.engine.hold_at = saying("A long story"), 6
    page = open_page(f"{server.url}/#playground")
    ask(page)
    wait_until(lambda: text_of(page) == "A long")
    page.click("#stop")
    answer = ended(page)
    assert "A long" in answer.inner_text() and "ended: abort" in answer.inner_text()
    server.wait_until_idle()
    assert page.is_enabled("#send")


def test_stop_before_the_first_token_is_told(server: LiveServer, open_page: Callable[..., Any]) -> None:
    server.engine.hold_at = 0
    page = open_page(f"{server.url}/#playground")
    ask(page)
    server.wait_until(lambda: server.engine.num_holding == 1)
    page.click("#stop")
    page.wait_for_selector(".failed")
    assert "aborted" in page.locator(".failed").inner_text()


def test_tokens_tell_their_probabilities_to_the_pointer_and_the_keyboard(
    server: LiveServer, open_page: Callable[..., Any]
) -> None:
    server.engine.rule = saying("Yes")
    page = open_page(f"{server.url}/#playground")
    ask(page)
    tokens = ended(page).locator(".token")
    assert tokens.all_text_contents() == ["Y", "e", "s"]
    tokens.nth(1).hover()
    by_pointer = page.locator("#tip").inner_text()
    page.mouse.move(0, 0)
    assert page.is_hidden("#tip")
    ended(page).locator(".text[tabindex]").focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert page.locator("#tip").inner_text() == by_pointer and by_pointer.startswith("e") and "%" in by_pointer
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")


def test_reasoning_is_folded(thinker: LiveServer, open_page: Callable[..., Any]) -> None:
    thinker.engine.rule = saying_tokens(thinker, "<think>Hm, a name.</think>Ada")
    page = open_page(f"{thinker.url}/#playground")
    ask(page)
    answer = ended(page)
    assert answer.locator(".reasoning .text").is_hidden() and "Ada" in answer.inner_text()
    answer.locator(".reasoning summary").click()
    assert answer.locator(".reasoning .text").inner_text() == "Hm, a name."


def test_a_call_is_shown_and_its_result_goes_back(hermes: LiveServer, open_page: Callable[..., Any]) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALL)
    page = open_page(f"{hermes.url}/#playground")
    page.locator("summary", has_text="Tools").click()
    page.click("#example")
    tools = page.input_value("#tools").replace('"weather"', '"get_weather"')
    page.fill("#tools", tools)
    ask(page, "How is it in Zürich?")
    answer = ended(page)
    assert (
        "get_weather" in answer.locator(".call").inner_text() and "Zürich" in answer.locator(".call pre").inner_text()
    )
    hermes.engine.rule = saying("It rains.")
    page.get_by_label("Result of get_weather").fill("rain")
    page.get_by_role("button", name="Send results").click()
    assert "It rains." in ended(page, 2).inner_text()
    assert prompt_of(hermes).endswith("[tool]rain[assistant]")


def test_a_refusal_is_told_where_the_answer_would_stand(server: LiveServer, open_page: Callable[..., Any]) -> None:
    server.engine.is_full = True
    page = open_page(f"{server.url}/#playground")
    ask(page)
    page.wait_for_selector(".failed")
    assert "All places are taken" in page.locator(".failed").inner_text()


def test_a_stream_that_fails_keeps_its_text_and_tells_why(server: LiveServer, open_page: Callable[..., Any]) -> None:
    server.engine.rule, server.engine.fail_at = saying("Hello"), 3
    page = open_page(f"{server.url}/#playground")
    ask(page)
    page.wait_for_selector(".failed")
    assert page.locator(".turn.assistant .text").last.text_content() == "Hel"


def test_the_key_is_asked_for_and_kept_in_this_tab_alone(open_page: Callable[..., Any]) -> None:
    with live_server(api_key=["schlüssel"]) as server:
        page = open_page(f"{server.url}/#playground")
        page.wait_for_selector("#key")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_selector("#trouble:not([hidden])")
        page.wait_for_selector("#ask:not([hidden])")
        page.fill("#key", "schlüssel")
        page.press("#key", "Enter")
        wait_until(lambda: page.title() == "fake")
        ask(page)
        ended(page)
        assert page.evaluate("sessionStorage.getItem('key')") == "schlüssel"
        assert page.evaluate("localStorage.length") == 0 and page.evaluate("document.cookie") == ""
        assert page.is_hidden("#ask") and page.is_hidden("#trouble")
