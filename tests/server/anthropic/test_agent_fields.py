"""/v1/messages as agents send it: fields that they cannot leave out are taken as what they mean."""

from typing import Any

import pytest

from tests.server.fake_engine import saying
from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.server.model_talk import ANTHROPIC_TOOLS as TOOLS
from tests.server.model_talk import prompt_of

CACHED = {"cache_control": {"type": "ephemeral"}}
HI = {"role": "user", "content": "Hi"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.c40; cc_entrypoint=sdk-cli; cch=1a2b3;"
CLEAR = {"type": "clear_thinking_20251015"}


def plain_prompt(server: LiveServer, **parameters: Any) -> str:
    server.message([HI], **parameters)
    return prompt_of(server)


@pytest.mark.parametrize(
    "hint",
    [
        {"context_management": {"edits": []}},
        {"context_management": {"edits": [{**CLEAR, "keep": "all"}]}},
        {"context_management": {"edits": [{**CLEAR, "keep": {"type": "all"}}]}},
        {"context_management": {}},
        {"context_management": []},
        {"context_management": None},
        {"output_config": {"effort": "high"}},
        {"speed": "fast"},
        {"metadata": {"user_id": "{}"}},
        {"service_tier": "auto"},
        {"container": None},
        {"mcp_servers": []},
        {"inference_geo": "eu"},
        {"cache_control": {"type": "ephemeral"}},
        {"thinking": {"type": "enabled", "budget_tokens": 31999}},
        {"thinking": {"type": "adaptive"}},
        {"thinking": {"type": "adaptive", "display": "summarized"}},
        {"thinking": {"type": "disabled"}},
        {"max_tokens": 32000},
        {"temperature": 1},
    ],
)
def test_hints_are_accepted_and_change_no_prompt(server: LiveServer, hint: dict[str, Any]) -> None:
    response = server.message([HI], **hint)
    assert response.status_code == 200, response.text
    assert prompt_of(server) == plain_prompt(server)


def test_cache_control_may_stand_on_every_block(agent: LiveServer) -> None:
    def conversation(mark: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "tool_use", "id": "1", "name": "get_time", "input": {}, **mark}
        result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "7", **mark}], **mark}
        return {
            "messages": [HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}],
            "system": [{"type": "text", "text": "Be brief.", **mark}],
            "tools": [{**TOOLS[0], **mark}, {**TOOLS[1], **mark}],
        }

    assert agent.message(**conversation(CACHED)).status_code == 200
    marked = prompt_of(agent)
    agent.message(**conversation({}))
    assert prompt_of(agent) == marked


@pytest.mark.parametrize("effort", ["low", "medium", "high", "xhigh", "max"])
def test_the_template_gets_the_effort(effort: str) -> None:
    with live_server(FakeBackend(chat_templates={"default": "{{ reasoning_effort }}{{ messages }}"})) as server:
        server.message([HI], output_config={"effort": effort})
        assert prompt_of(server).startswith({"xhigh": "high", "max": "high"}.get(effort, effort))
        server.message([HI], output_config={"effort": effort}, chat_template_kwargs={"reasoning_effort": "own"})
        assert prompt_of(server).startswith("own")


def test_a_budget_on_a_model_that_does_not_think_holds_by_itself(server: LiveServer) -> None:
    server.message([HI], thinking={"type": "enabled", "budget_tokens": 1024})
    assert server.engine.requests[-1].params.thinking is None


@pytest.mark.parametrize(
    ("system", "same_as"),
    [
        ([{"type": "text", "text": BILLING}, {"type": "text", "text": "Be brief."}], "Be brief."),
        ([{"type": "text", "text": f"{BILLING}\nBe brief."}], "Be brief."),
        (f"{BILLING}\nBe brief.", "Be brief."),
        ([{"type": "text", "text": BILLING}], None),
        (BILLING, None),
        ("See x-anthropic-billing-header: cch=1", "See x-anthropic-billing-header: cch=1"),
    ],
)
def test_a_line_for_accounting_is_not_in_the_prompt(server: LiveServer, system: Any, same_as: str | None) -> None:
    """It differs in every request: in the prompt, nothing behind it would be found in the prefix cache."""
    assert plain_prompt(server, system=system) == plain_prompt(server, system=same_as)


@pytest.mark.parametrize(
    ("keep", "kept"),
    [("all", "AB CD E"), ({"type": "all"}, "AB CD E"), (None, "E"), ({"type": "thinking_turns", "value": 2}, "CD E")],
)
def test_thinking_of_older_turns_is_cleared(agent: LiveServer, keep: Any, kept: str) -> None:
    """A turn has all the calls between two messages of the user."""

    def thought(name: str, *blocks: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "thinking", "thinking": name, "signature": ""}, *blocks]}

    def call(name: str) -> list[dict[str, Any]]:
        result = {"type": "tool_result", "tool_use_id": name, "content": "7"}
        use = {"type": "tool_use", "id": name, "name": "get_time", "input": {}}
        return [thought(name, use), {"role": "user", "content": [result]}]

    end = {"type": "text", "text": "So."}
    messages = [HI, *call("A"), thought("B", end), HI, *call("C"), thought("D", end), HI, *call("E")]
    agent.message(messages, context_management={"edits": [{**CLEAR, "keep": keep}]})
    for name in "ABCDE":
        assert (f"({name})" in prompt_of(agent)) == (name in kept)


def test_tokens_are_counted_as_a_message_of_an_agent_uses_them(spacious: LiveServer) -> None:
    fields: dict[str, Any] = {
        "messages": [HI, {"role": "system", "content": "Stop."}],
        "system": [{"type": "text", "text": BILLING}, {"type": "text", "text": "Be brief.", **CACHED}],
        "tools": [
            *TOOLS,
            {"type": "web_search_20250305", "name": "web_search"},
            {"type": "bash_20250124", "name": "bash"},
        ],
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{**CLEAR, "keep": "all"}]},
    }
    spacious.engine.rule = saying("So.")
    counted = spacious.client.post("/v1/messages/count_tokens", json=fields).json()
    usage = spacious.message(**fields, max_tokens=32000).json()["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_creation_input_tokens"]}
