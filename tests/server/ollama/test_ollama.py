"""/api/chat and /api/generate: the answers, whole and as lines of JSON."""

import json
from typing import Any

import httpx
import pytest

from server.ollama.writer import durations
from server.protocol.ollama import OllamaChatAnswer, OllamaGenerateAnswer
from tests.server.events import json_lines_of
from tests.server.fake_engine import saying
from tests.server.live_server import LiveServer, live_server
from tests.server.model_talk import CALL, THOUGHT, WEATHER, saying_tokens

USER = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time"}},
]


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Returns the lines of a stream, of which the last one ends it."""
    assert response.headers["content-type"].partition(";")[0] == "application/x-ndjson", response.text
    return json_lines_of(response)


def joined(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message that a stream of /api/chat adds up to."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for each in lines:
        for name, value in each["message"].items():
            message[name] = value if name == "role" else message.get(name, type(value)()) + value
    return message


def test_a_chat_is_answered_with_a_message(server: LiveServer) -> None:
    server.engine.rule = saying("Hello")
    response = server.ollama(USER)
    body = response.json()
    assert body["message"] == {"role": "assistant", "content": "Hello"}
    assert (body["model"], body["done"], body["done_reason"]) == ("fake", True, "stop")
    assert body["created_at"].endswith("Z") and body["timings"]["ttft_ms"] == 3.0
    assert body["eval_count"] == 6 == int(response.headers["X-Generated-Tokens"])
    assert OllamaChatAnswer.model_validate(body).message.content == "Hello"


def test_a_prompt_is_answered_with_a_response(server: LiveServer) -> None:
    server.engine.rule = saying("Hello")
    body = server.ollama("Hi").json()
    assert (body["response"], body["done_reason"]) == ("Hello", "stop")
    assert OllamaGenerateAnswer.model_validate(body).done


def test_durations_are_nanoseconds_of_the_phases(server: LiveServer) -> None:
    server.engine.rule = saying("Hello")
    body = server.ollama("Hi").json()
    assert (body["load_duration"], body["prompt_eval_duration"], body["eval_duration"]) == (10**6, 2 * 10**6, 2_500_000)
    assert body["total_duration"] == 5_500_000 and body["prompt_eval_count"] == body["timings"]["prompt_tokens"] > 0


def test_what_is_zero_is_left_out_for_clients_divide_by_it() -> None:
    timings = {"e2e_ms": 3.0, "queue_ms": 0.0, "prefill_ms": 3.0, "decode_ms": 0.0, "prompt_tokens": 2}
    counted = durations({**timings, "generated_tokens": 1})
    assert counted == {
        "total_duration": 3_000_000,
        "prompt_eval_duration": 3_000_000,
        "prompt_eval_count": 2,
        "eval_count": 1,
    }


def test_streams_are_the_default_and_add_up_to_the_whole_answer(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    named = {"X-Request-Id": "same"}
    whole = agent.ollama(USER, named, tools=TOOLS).json()
    response = agent.post_json("/api/chat", {"messages": USER, "tools": TOOLS}, named)
    lines = lines_of(response)
    assert response.headers["X-TTFT-Ms"] == "3.0"
    assert joined(lines) == whole["message"]
    assert not any(each["done"] for each in lines[:-1])
    assert lines[-1] == whole | {"message": {"role": "assistant", "content": ""}, "created_at": lines[-1]["created_at"]}


def test_thoughts_text_and_calls_are_told_apart(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    message = agent.ollama(USER, tools=TOOLS).json()["message"]
    assert (message["thinking"], message["content"]) == ("Hm.", "Let me see.")
    first, second = message["tool_calls"]
    assert first["function"] == {"index": 0, "name": "get_weather", "arguments": {"city": "Zürich"}}
    assert second["function"] == {"index": 1, "name": "get_time", "arguments": {}}
    assert first["id"] != second["id"]


def test_a_call_is_one_line(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, CALL)
    lines = lines_of(agent.ollama(USER, tools=TOOLS, stream=True))
    assert [len(each["message"].get("tool_calls", ())) for each in lines] == [1, 0]


@pytest.mark.parametrize(
    ("output", "options", "reason"),
    [
        (CALL, {"num_predict": 48}, "length"),
        (CALL, {"num_predict": 38}, "length"),
        (CALL.replace('"Zürich"', "NaN"), {}, "stop"),
        (CALL.replace('{"city": "Zürich"}', "[1]"), {}, "stop"),
    ],
)
def test_what_is_no_whole_call_is_told_as_text(
    agent: LiveServer, output: str, options: dict[str, Any], reason: str
) -> None:
    agent.engine.rule = saying_tokens(agent, output)
    whole = agent.ollama(USER, tools=TOOLS, options=options).json()
    assert "tool_calls" not in whole["message"] and whole["done_reason"] == reason
    assert '{"name": "get_weather", "arguments": ' in whole["message"]["content"]
    assert joined(lines_of(agent.ollama(USER, tools=TOOLS, options=options, stream=True))) == whole["message"]


def test_generate_tells_thoughts_too(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, "<think>Hm.</think>Well.")
    body = agent.ollama("Hi").json()
    assert (body["thinking"], body["response"]) == ("Hm.", "Well.")
    lines = lines_of(agent.ollama("Hi", stream=True))
    assert "".join(each["response"] for each in lines) == "Well."
    assert "".join(each.get("thinking", "") for each in lines) == "Hm."


def test_raw_text_is_not_parsed(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, "<think>Hm.</think>Well.")
    assert agent.ollama("Hi", raw=True).json()["response"] in ("Hm.Well.", "<think>Hm.</think>Well.")


@pytest.mark.parametrize("raw", [False, True])
def test_a_prompt_that_is_cut_to_fit_leaves_room_for_a_token(server: LiveServer, raw: bool) -> None:
    body = server.ollama("x" * 999, raw=raw, truncate_prompt_tokens=-1).json()
    assert body["prompt_eval_count"] == server.engine.info.max_model_len - 1 and body["eval_count"] == 1


@pytest.mark.parametrize("options", [{}, {"num_predict": -1}, {"num_predict": -2}, {"num_predict": 10**6}])
@pytest.mark.parametrize("raw", [False, True])
def test_an_answer_may_fill_the_context_and_ends_with_it(
    server: LiveServer, options: dict[str, int], raw: bool
) -> None:
    body = server.ollama("Hi", raw=raw, options=options).json()
    assert body["done_reason"] == "length"
    assert body["prompt_eval_count"] + body["eval_count"] == server.engine.info.max_model_len


def test_without_a_prompt_the_model_is_there_already(server: LiveServer) -> None:
    for path, field in (("/api/generate", "response"), ("/api/chat", "message")):
        answer = server.post_json(path, {"keep_alive": 0})
        assert answer.json()["done_reason"] == "load" and answer.json()["done"] and field in answer.json()
    assert server.engine.requests == []


def test_a_stream_that_fails_ends_with_an_error(server: LiveServer) -> None:
    server.engine.fail_at = 2
    *lines, last = lines_of(server.ollama("Hi", stream=True))
    assert set(last) == {"error"} and "Internal error" in last["error"]
    assert lines and not any(each["done"] for each in lines)


def test_silence_is_silent_for_clients_read_each_line_as_json(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.generation.sse.IDLE_S", 0.0)
    monkeypatch.setattr("server.generation.sse.PING_S", 0.01)
    server.engine.delay_s = 0.1
    assert len(lines_of(server.ollama("Hi", stream=True, options={"num_predict": 3}))) == 4


def test_keys_count_as_elsewhere() -> None:
    with live_server(api_key=["right"]) as server:
        refused = server.ollama("Hi")
        assert refused.status_code == 401 and "API key" in refused.json()["error"]
        assert server.client.get("/api/tags").status_code == 401
        assert server.ollama("Hi", {"Authorization": "Bearer right"}).status_code == 200


def test_curl_needs_no_header_but_a_web_page_does(server: LiveServer) -> None:
    server.engine.rule = saying("Hello")
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    body = json.dumps({"model": "fake", "prompt": "Hi", "stream": False})

    def asked(path: str, content: str = body, **headers: str) -> httpx.Response:
        return server.client.post(path, content=content, headers=form | headers)

    assert asked("/api/generate").json()["response"] == "Hello"
    assert asked("/api/show", '{"model": "fake"}').status_code == 200
    assert asked("/api/generate", origin="http://elsewhere.example").status_code == 415
    assert asked("/api/generate", "model=fake&prompt=Hi").status_code == 400
    assert asked("/v1/completions").status_code == 415
