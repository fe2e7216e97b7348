"""The official client and /v1/responses: every answer and event fits its types, checked strictly."""

from collections.abc import Generator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.events import typed_events_of
from tests.server.live_server import LiveServer
from tests.server.test_responses import THOUGHT, TOOLS, saying_tokens

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def client(agent: LiveServer) -> Generator[OpenAI, None, None]:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    with OpenAI(base_url=f"{agent.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "input": "Hi", "tools": TOOLS, **fields}


@pytest.mark.parametrize("limit", [1, 9, None])
def test_answers_fit_the_clients_types(client: OpenAI, agent: LiveServer, limit: int | None) -> None:
    body = agent.respond(tools=TOOLS, max_output_tokens=limit, include=["message.output_text.logprobs"]).content
    assert Response.model_validate_json(body, strict=True).status == ("completed" if limit is None else "incomplete")


@pytest.mark.parametrize("fail_at", [None, 3])
def test_events_fit_the_clients_types(client: OpenAI, agent: LiveServer, fail_at: int | None) -> None:
    agent.engine.fail_at = fail_at
    for event in typed_events_of(agent.respond(tools=TOOLS, stream=True, include=["message.output_text.logprobs"])):
        assert EVENT.validate_python(event).type == event["type"]


def test_it_answers(client: OpenAI) -> None:
    answer = client.responses.create(**ask())
    assert answer.output_text == "Let me see."
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]


def test_its_stream_helper_builds_the_response(client: OpenAI) -> None:
    with client.responses.stream(**ask()) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert final.output_text == "Let me see." and final.usage is not None


def test_its_output_can_be_sent_back(client: OpenAI) -> None:
    output = client.responses.create(**ask()).output
    told = [{"role": "user", "content": "Hi"}, *(item.model_dump() for item in output)]
    assert client.responses.create(**ask(input=told)).output_text.startswith("Let me see.")


def test_it_understands_errors(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(**ask(previous_response_id="resp_1"))
    assert bad.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
