"""/v1/responses: hints, which change no answer, or reach no more than the template."""

from collections.abc import Generator
from typing import Any

import pytest

from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.server.model_talk import prompt_of

EFFORTS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "|{{ reasoning_effort }}|{{ 'off' if enable_thinking is defined and not enable_thinking }}"
)


@pytest.fixture(scope="module")
def efforts() -> Generator[LiveServer, None, None]:
    """A server whose template tells the model how much to think."""
    with live_server(FakeBackend(chat_templates={"default": EFFORTS})) as running:
        yield running


@pytest.mark.parametrize(
    "hint",
    [
        {"include": ["reasoning.encrypted_content", "web_search_call.action.sources", "file_search_call.results"]},
        {"reasoning": {"summary": "auto"}},
        {"reasoning": {"generate_summary": "concise", "context": "all_turns", "mode": "standard"}},
        {"text": {"verbosity": "low"}},
        {"text": {"verbosity": "high", "format": {"type": "text"}}},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "1h"}},
        {"store": False, "service_tier": "flex", "parallel_tool_calls": True, "safety_identifier": "s"},
        {"client_metadata": {"session_id": "s"}},
    ],
)
def test_hints_change_no_answer(agent: LiveServer, caplog: pytest.LogCaptureFixture, hint: dict[str, Any]) -> None:
    with caplog.at_level("INFO", logger="twostep.server"):
        plain, hinted = agent.respond(seed=1, max_output_tokens=9), agent.respond(seed=1, max_output_tokens=9, **hint)
    first, second = agent.engine.requests[-2:]
    assert (first.prompt_token_ids, first.params) == (second.prompt_token_ids, second.params)
    assert hinted.json()["output"][0]["content"] == plain.json()["output"][0]["content"]
    assert not [record for record in caplog.records if "ignored" in record.getMessage()]


def test_hints_are_told_as_they_were_given(server: LiveServer) -> None:
    body = server.respond(
        max_output_tokens=1, text={"verbosity": "low"}, reasoning={"effort": "high", "generate_summary": "auto"}
    ).json()
    assert body["text"]["verbosity"] == "low" and body["reasoning"] == {"effort": "high", "summary": "auto"}


@pytest.mark.parametrize(
    ("reasoning", "kwargs", "end"),
    [
        ({"effort": "high"}, {}, "|high|"),
        ({"effort": "none"}, {}, "|none|off"),
        ({"effort": "max"}, {}, "|max|"),
        ({"effort": "high"}, {"reasoning_effort": "low"}, "|low|"),
        ({}, {}, "||"),
    ],
)
def test_the_effort_reaches_the_template(
    efforts: LiveServer, reasoning: dict[str, Any], kwargs: dict[str, Any], end: str
) -> None:
    efforts.respond(reasoning=reasoning, chat_template_kwargs=kwargs)
    assert prompt_of(efforts).endswith(end)
