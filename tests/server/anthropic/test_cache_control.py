"""`cache_control`, wherever it stands, retains the prompt for its time to live, and usage tells what it cached."""

from typing import Any

import pytest

from tests.server.events import anthropic_error_of, typed_events_of
from tests.server.live_server import LiveServer
from tests.server.model_talk import ANTHROPIC_TOOLS as TOOLS
from tests.server.model_talk import prompt_of

HI = {"role": "user", "content": "Hi"}
LONG = [{"role": "user", "content": "x" * 100}]
FIVE_MINUTES, ONE_HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
PLACES = {
    "request": lambda mark: {"cache_control": mark},
    "system": lambda mark: {"system": [{"type": "text", "text": "Be brief.", "cache_control": mark}]},
    "tool": lambda mark: {"tools": [TOOLS[0], {**TOOLS[1], "cache_control": mark}]},
    "text": lambda mark: {"messages": [{**HI, "content": [{"type": "text", "text": "Hi", "cache_control": mark}]}]},
    "call": lambda mark: {"messages": [HI, *exchange({"cache_control": mark}, {})]},
    "result": lambda mark: {"messages": [HI, *exchange({}, {"cache_control": mark})]},
    "text of a result": lambda mark: {
        "messages": [HI, *exchange({}, {"content": [{"type": "text", "text": "7", "cache_control": mark}]})]
    },
}


def exchange(call: dict[str, Any], result: dict[str, Any]) -> list[dict[str, Any]]:
    tool_use = {"type": "tool_use", "id": "1", "name": "get_time", "input": {}, **call}
    tool_result = {"type": "tool_result", "tool_use_id": "1", "content": "7", **result}
    return [{"role": "assistant", "content": [tool_use]}, {"role": "user", "content": [tool_result]}]


@pytest.mark.parametrize("place", PLACES)
def test_a_mark_retains_the_prompt_for_its_time_to_live(agent: LiveServer, place: str) -> None:
    for mark, seconds in ((FIVE_MINUTES, 300.0), (ONE_HOUR, 3600.0), ({**ONE_HOUR, "scope": "global"}, 3600.0)):
        fields = {"messages": [HI], **PLACES[place](mark)}
        assert agent.message(**fields).status_code == 200
        assert agent.engine.requests[-1].steering.retain_s == seconds
    marked = prompt_of(agent)
    agent.message(**{"messages": [HI], **PLACES[place](None)})
    assert prompt_of(agent) == marked and agent.engine.requests[-1].steering.retain_s == 0.0


def test_the_longest_time_to_live_counts(agent: LiveServer) -> None:
    agent.message([HI], **PLACES["system"](ONE_HOUR), **PLACES["request"](FIVE_MINUTES))
    assert agent.engine.requests[-1].steering.retain_s == 3600.0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mark", [{"type": "ephemeral", "ttl": "2h"}, {"type": "permanent"}, {"ttl": "1h"}])
def test_an_unknown_time_to_live_is_refused(agent: LiveServer, place: str, mark: dict[str, Any]) -> None:
    response = agent.message(**{"messages": [HI], **PLACES[place](mark)})
    assert response.status_code == 400 and "cache_control" in anthropic_error_of(response)["message"]


@pytest.mark.parametrize(("cached", "created"), [(0, 112), (32, 80), (112, 0), (115, 0)])
def test_usage_tells_what_was_computed_and_cached(server: LiveServer, cached: int, created: int) -> None:
    """The prompt has 118 tokens: seven full blocks."""
    server.engine.num_cached_tokens = cached
    usage = server.message(LONG, cache_control=FIVE_MINUTES).json()["usage"]
    assert len(server.engine.requests[-1].prompt_token_ids) == 118
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (cached, created)
    assert usage["input_tokens"] == 118 - cached - created
    *_, delta, _ = typed_events_of(server.message(LONG, cache_control=FIVE_MINUTES, stream=True))
    assert delta["usage"] == usage


def test_without_a_mark_nothing_is_told_to_be_cached(server: LiveServer) -> None:
    usage = server.message(LONG).json()["usage"]
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["input_tokens"] == len(server.engine.requests[-1].prompt_token_ids)
