"""OpenAI's official client as a consumer of /v1/responses."""

from collections.abc import Generator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.server.live_server import LiveServer
from tests.server.model_talk import RESPONSES_TOOLS as TOOLS
from tests.server.model_talk import THOUGHT, saying_tokens


@pytest.fixture
def client(agent: LiveServer) -> Generator[OpenAI, None, None]:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    with OpenAI(base_url=f"{agent.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "input": "Hi", "tools": TOOLS, **fields}


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
    items = [{"role": "user", "content": "Hi"}, *(item.model_dump() for item in output)]
    assert client.responses.create(**ask(input=items)).output_text.startswith("Let me see.")


def test_it_understands_errors(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(**ask(previous_response_id="resp_1"))
    assert bad.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
