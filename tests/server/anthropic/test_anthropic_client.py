"""Anthropic's official client as a consumer of /v1/messages."""

from collections.abc import Generator
from datetime import UTC, datetime
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from engine.core.errors import RequestTimeoutError
from tests.server.live_server import LiveServer, live_server
from tests.server.model_talk import ANTHROPIC_TOOLS as TOOLS
from tests.server.model_talk import THOUGHT, saying_tokens


@pytest.fixture
def client(agent: LiveServer) -> Generator[Anthropic, None, None]:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    with Anthropic(base_url=agent.url, api_key="none", max_retries=0) as client:
        yield client


def ask(**fields: Any) -> dict[str, Any]:
    return {
        "model": "fake",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": TOOLS,
        "max_tokens": 200,
        **fields,
    }


def test_its_stream_helper_builds_the_message(client: Anthropic) -> None:
    whole = client.messages.create(**ask())
    with client.messages.stream(**ask()) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in final.content if block.type == "tool_use"] == [
        block.input for block in whole.content if block.type == "tool_use"
    ]
    assert final.usage == whole.usage and final.stop_reason == whole.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((value, {}) for value in ("Oslo", "True", "'Oslo'", '"two\nlines"', r'"\q"', "NaN")),
        ('"Oslo",', {"city": "Oslo"}),  # what came before the mistake
    ],
)
def test_its_stream_helper_survives_arguments_that_are_no_json(
    client: Anthropic, agent: LiveServer, value: str, expected: dict[str, str]
) -> None:
    call = f'<tool_call>{{"name": "get_weather", "arguments": {{"city": {value}}}}}</tool_call>'
    agent.engine.rule = saying_tokens(agent, call)
    with client.messages.stream(**ask()) as stream:
        final = stream.get_final_message()
    assert [block.type == "tool_use" and block.input for block in final.content] == [expected]
    assert final.stop_reason == "tool_use"


def test_it_counts_tokens(client: Anthropic) -> None:
    fields = {name: value for name, value in ask().items() if name != "max_tokens"}
    counted = client.messages.count_tokens(**fields).input_tokens
    assert counted == client.messages.create(**ask()).usage.input_tokens


def test_it_lists_models(client: Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == ("fake", "model", "fake")
    assert model.created_at == client.models.retrieve("fake").created_at == datetime.fromtimestamp(1_700_000_000, UTC)


def test_it_understands_errors(client: Anthropic, agent: LiveServer) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**ask(model="other"))
    assert unknown.value.request_id == unknown.value.body["request_id"]  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**ask(max_tokens=0))
    agent.engine.fail_at = 1
    with pytest.raises(anthropic.APIStatusError, match="Internal error"), client.messages.stream(**ask()) as stream:
        stream.get_final_message()


def test_it_does_not_repeat_what_its_own_deadline_ended(client: Anthropic, agent: LiveServer) -> None:
    agent.engine.refusal = RequestTimeoutError("Late.", is_own_limit=True)
    with pytest.raises(anthropic.APIStatusError) as late:
        client.with_options(max_retries=2).messages.create(**ask(extra_body={"max_queue_ms": 1000}))
    assert late.value.status_code == 504 and late.value.request.headers["x-stainless-retry-count"] == "0"


def test_it_sends_its_key() -> None:
    with live_server(api_key=["right"]) as server, Anthropic(base_url=server.url, api_key="right") as client:
        assert client.messages.create(**ask(tools=[], max_tokens=1)).stop_reason == "max_tokens"
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="wrong").messages.create(**ask(tools=[]))
