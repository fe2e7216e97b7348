"""/v1/responses: the answers, whole and streamed."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from engine.core.request import FinishReason
from server.protocol.response_answers import ResponseBody
from tests.server.events import typed_events_of
from tests.server.fake_engine import saying
from tests.server.live_server import LiveServer
from tests.server.model_talk import CALL, THOUGHT, WEATHER, saying_tokens
from tests.server.model_talk import RESPONSES_TOOLS as TOOLS

GOLDEN = Path(__file__).parents[1] / "golden"


def kinds(events: Iterable[dict[str, Any]]) -> list[str]:
    """Returns the events' types, each run of deltas as one."""
    types = [event["type"].removeprefix("response.") for event in events]
    return [kind for kind, before in zip(types, ["", *types], strict=False) if not kind == before != ""]


def texts(body: dict[str, Any]) -> list[str]:
    return [part["text"] for item in body["output"] for part in item.get("content", ())]


def test_an_answer_is_a_message(server: LiveServer) -> None:
    server.engine.rule = saying("Hello")
    response = server.respond(max_output_tokens=9, instructions="Be brief.", metadata={"a": "b"}, user="me")
    body = response.json()
    [item] = body["output"]
    assert (item["type"], item["role"], item["status"], texts(body)) == ("message", "assistant", "completed", ["Hello"])
    assert (body["status"], body["object"], body["incomplete_details"]) == ("completed", "response", None)
    assert (body["instructions"], body["metadata"], body["user"]) == ("Be brief.", {"a": "b"}, "me")
    assert body["usage"]["output_tokens"] == 6 == int(response.headers["X-Generated-Tokens"])
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + 6
    assert body["timings"]["ttft_ms"] == 3.0


def test_an_answer_that_is_cut_is_incomplete(server: LiveServer) -> None:
    body = server.respond(max_output_tokens=3).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete" and body["completed_at"] is None


def test_the_stop_string_is_reported(server: LiveServer) -> None:
    server.engine.rule = saying("Hello")
    body = server.respond(stop=["l"]).json()
    assert (texts(body), body["status"], body["stop_reason"]) == (["He"], "completed", "l")


def test_an_empty_answer_is_an_empty_message(server: LiveServer) -> None:
    server.engine.rule = saying("")
    assert texts(server.respond().json()) == [""]
    events = typed_events_of(server.respond(stream=True))
    assert texts(events[-1]["response"]) == [""] and kinds(events)[2] == "output_item.added"


def test_cached_tokens_are_counted(server: LiveServer) -> None:
    server.engine.num_cached_tokens = 16
    usage = server.respond(max_output_tokens=1).json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 16


def test_thinking_text_and_calls_are_items(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    body = agent.respond(tools=TOOLS).json()
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert texts(body) == ["Hm.", "Let me see."]
    calls = body["output"][2:]
    assert [call["name"] for call in calls] == ["get_weather", "get_time"]
    assert [call["arguments"] for call in calls] == ['{"city": "Zürich"}', "{}"]
    assert len({call["call_id"] for call in calls}) == 2 == len({call["id"] for call in calls})
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == 5
    assert body["tools"][0]["parameters"] == WEATHER


def test_a_call_that_is_stopped_is_incomplete(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    body = agent.respond(tools=TOOLS, stop="Zü").json()
    assert [item["status"] for item in body["output"]] == ["completed", "completed", "incomplete"]


@pytest.mark.parametrize("limit", [None, 3, 12, 60])
def test_a_stream_ends_with_what_a_whole_response_is(agent: LiveServer, limit: int | None) -> None:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    asked = {"tools": TOOLS, "seed": 1, "max_output_tokens": limit, "headers": {"X-Request-Id": "same"}}
    [*_, last] = typed_events_of(agent.respond(stream=True, **asked))
    whole = agent.respond(**asked).json()
    for body in (whole, last["response"]):
        del body["created_at"], body["completed_at"]
    assert last["response"] == whole and last["type"] == f"response.{whole['status']}"


def test_events_come_in_openais_order(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, f"<think>Hm.</think>Yes.{CALL}")
    events = typed_events_of(agent.respond(tools=TOOLS, stream=True))
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", *(f"function_call_arguments.{name}" for name in ("delta", "done")), "output_item.done"]
    reasoning, message = ([kind.format(name) for kind in text] for name in ("reasoning_text", "output_text"))
    assert kinds(events) == ["created", "in_progress", *reasoning, *message, *call, "completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_deltas_add_up(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    events = typed_events_of(agent.respond(tools=TOOLS, stream=True))
    all_done = [event for event in events if event["type"].endswith(("text.done", "arguments.done"))]
    assert len(all_done) == 4
    for done in all_done:
        deltas = [each for each in events if each["type"] == done["type"].replace("done", "delta")]
        written = "".join(each["delta"] for each in deltas if each["item_id"] == done["item_id"])
        assert written == done.get("text", done.get("arguments"))


def test_the_scores_are_those_of_the_texts_tokens(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, f"<think>Hm.</think>Yes é.{CALL}")
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "tools": TOOLS}
    part = agent.respond(**asked).json()["output"][1]["content"][0]
    assert b"".join(bytes(each["bytes"]) for each in part["logprobs"]).decode() == "Yes é."
    assert all(len(each["top_logprobs"]) == 2 for each in part["logprobs"])
    events = typed_events_of(agent.respond(stream=True, **asked))
    streamed = [
        score for event in events if event["type"] == "response.output_text.delta" for score in event["logprobs"]
    ]
    assert streamed == part["logprobs"]


def test_the_scores_of_calls_are_not_those_of_texts(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, f"{CALL}get")
    body = agent.respond(tools=TOOLS, include=["message.output_text.logprobs"]).json()
    assert [each["token"] for each in body["output"][1]["content"][0]["logprobs"]] == ["g", "e", "t"]


def test_the_score_of_the_end_is_not_that_of_text_that_was_held_back(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, "Hello <")
    [message] = agent.respond(tools=TOOLS, include=["message.output_text.logprobs"]).json()["output"]
    [part] = message["content"]
    assert b"".join(bytes(each["bytes"]) for each in part["logprobs"]).decode() == part["text"] == "Hello <"


def test_an_error_in_a_stream_fails_the_response(server: LiveServer) -> None:
    server.engine.fail_at = 2
    *_, last = typed_events_of(server.respond(stream=True))
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert "secret" not in last["response"]["error"]["message"]


@pytest.mark.parametrize(
    ("name", "output", "parameters"),
    [
        ("plain", 'a\u2028é\x85"\n', {}),
        ("empty", "", {}),
        ("length", "Hello", {"max_output_tokens": 2, "instructions": "Be brief.", "metadata": {"a": "b"}}),
        ("logprobs", "é!", {"include": ["message.output_text.logprobs"], "top_logprobs": 1}),
        ("tools", THOUGHT, {"tools": TOOLS}),
    ],
)
def test_the_bytes_of_a_stream_are_as_they_were(
    agent: LiveServer, name: str, output: str, parameters: dict[str, Any]
) -> None:
    """A difference is a change for every client: rewrite the golden file only when that is meant."""
    agent.engine.rule = saying_tokens(agent, output)
    assert golden(agent, **parameters) == (GOLDEN / f"response_{name}.sse").read_bytes()


def test_the_bytes_after_an_error_are_as_they_were(agent: LiveServer) -> None:
    agent.engine.fail_at = 1
    assert golden(agent) == (GOLDEN / "response_error.sse").read_bytes()


def golden(server: LiveServer, **parameters: Any) -> bytes:
    body = server.respond(stream=True, seed=1, headers={"X-Request-Id": "golden"}, **parameters).content
    return re.sub(rb'_at":\d+', b'_at":0', re.sub(rb"fp_[0-9a-f]{10}", b"fp_0", body))


def test_answers_are_as_documented(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    body = agent.respond(tools=TOOLS, include=["message.output_text.logprobs"], tool_choice="auto").json()
    assert ResponseBody.model_validate(body).model_dump(exclude_unset=True) == body


def test_a_client_that_leaves_a_stream_aborts_it(server: LiveServer) -> None:
    server.engine.hold_at = 3
    with server.client.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True}) as response:
        assert next(response.iter_bytes()).startswith(b"event: response.created\n")
    server.wait_until_idle()
    assert server.engine.finished == [FinishReason.ABORT]
