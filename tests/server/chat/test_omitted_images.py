"""Images in results of tools, which agents cannot help sending back: the model is told of them, and so is the log."""

from typing import Any

import pytest

from server.protocol.messages import OMITTED_IMAGE
from tests.server.events import error_of
from tests.server.live_server import LiveServer
from tests.server.model_talk import ANTHROPIC_CALL, prompt_of

DATA = "data:image/png;base64,iVBORw0KGgo="
URL = {"type": "image_url", "image_url": {"url": DATA}}
INPUT = {"type": "input_image", "image_url": DATA, "detail": "high"}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
TOLD = "[tool]Taken.\n[image omitted: this model reads text only][assistant]"


def chat(server: LiveServer, **parameters: Any) -> Any:
    content = [{"type": "text", "text": "Taken."}, URL]
    return server.chat([{"role": "tool", "tool_call_id": "1", "content": content}], **parameters)


def respond(server: LiveServer, **parameters: Any) -> Any:
    output = [{"type": "input_text", "text": "Taken."}, INPUT]
    return server.respond([{"type": "function_call_output", "call_id": "1", "output": output}], **parameters)


def respond_custom(server: LiveServer, **parameters: Any) -> Any:
    output = [{"type": "output_text", "text": "Taken."}, INPUT]
    return server.respond([{"type": "custom_tool_call_output", "call_id": "1", "output": output}], **parameters)


def message(server: LiveServer, **parameters: Any) -> Any:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "Taken."}, BLOCK]}
    return server.message([ANTHROPIC_CALL, {"role": "user", "content": [result]}], **parameters)


@pytest.mark.parametrize("ask", [chat, respond, respond_custom, message])
def test_the_model_is_told_and_the_log_too(agent: LiveServer, ask: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "twostep.server"):
        response = ask(agent, headers={"X-Request-Id": "mine"})
    assert response.status_code == 200, response.text
    assert prompt_of(agent).endswith(TOLD)
    assert "request mine: the model reads text only: it is told of 1 images of tools" in caplog.text


def test_images_are_counted(agent: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    results = [{"role": "tool", "tool_call_id": str(number), "content": [URL] * number} for number in range(4)]
    with caplog.at_level("INFO", "twostep.server"):
        agent.chat(results)
        agent.chat([{"role": "tool", "tool_call_id": "1", "content": "text"}, {"role": "user", "content": "Hi"}])
    assert [each.getMessage().split()[-4] for each in caplog.records if "images" in each.getMessage()] == ["6"]
    assert prompt_of(agent).count(OMITTED_IMAGE) == 0


def test_tokens_of_what_is_told_are_counted(agent: LiveServer) -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [BLOCK]}
    messages = [ANTHROPIC_CALL, {"role": "user", "content": [result]}]
    counted = agent.post_json("/v1/messages/count_tokens", {"messages": messages}).json()["input_tokens"]
    assert counted == agent.message(messages).json()["usage"]["input_tokens"] > len(OMITTED_IMAGE)


def test_images_of_users_are_refused(agent: LiveServer) -> None:
    assert error_of(agent.chat([{"role": "user", "content": [URL]}]))["param"] == "messages.0.content.0"
    assert error_of(agent.respond([{"role": "user", "content": [INPUT]}]))["param"] == "input.0.content.0"
    assert agent.message([{"role": "user", "content": [BLOCK]}]).status_code == 400


@pytest.mark.parametrize(
    "part", [{"type": "input_audio"}, {"type": "file"}, {"type": "image"}, {"type": ["image_url"]}]
)
def test_other_parts_of_results_are_refused(agent: LiveServer, part: dict[str, Any]) -> None:
    error = error_of(agent.chat([{"role": "tool", "tool_call_id": "1", "content": [part]}]))
    assert error["param"] == "messages.0.content.0"
