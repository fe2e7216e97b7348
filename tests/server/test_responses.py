"""/v1/responses: what is asked of the model, what clients are told, what is refused."""

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from engine.client import GenerationRequest
from engine.request import FinishReason
from server.protocol.response_answers import ResponseBody
from tests.server.byte_tokenizer import EOS
from tests.server.events import error_of, typed_events_of
from tests.server.fake_engine import saying
from tests.server.live_server import LiveServer

GOLDEN = Path(__file__).parent / "golden"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "name": "get_weather", "parameters": WEATHER}, {"type": "function", "name": "get_time"}]
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>'
THOUGHT = f'<think>Hm.</think>Let me see.{CALL}<tool_call>{{"name": "get_time", "arguments": {{}}}}</tool_call>'


def saying_tokens(server: LiveServer, text: str) -> Callable[[GenerationRequest, int], int]:
    """Says the text with the special tokens in it."""
    ids = [*server.engine.tokenizer.encode(text, add_special_tokens=False), EOS]
    return lambda _, position: ids[position]


def prompt_of(server: LiveServer) -> str:
    tokenizer = server.engine.tokenizer
    return tokenizer.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def kinds(events: Iterable[dict[str, Any]]) -> list[str]:
    """The events' types, each run of deltas as one."""
    types = [event["type"].removeprefix("response.") for event in events]
    return [kind for kind, before in zip(types, ["", *types], strict=False) if not kind == before != ""]


def texts(body: dict[str, Any]) -> list[str]:
    return [part["text"] for item in body["output"] for part in item.get("content", ())]


# What clients are told.


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


def test_what_stopped_it_is_told(server: LiveServer) -> None:
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
    for done in events:
        if done["type"].endswith(("text.done", "arguments.done")):
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
    told = [score for event in events if event["type"] == "response.output_text.delta" for score in event["logprobs"]]
    assert told == part["logprobs"]


def test_the_scores_of_calls_are_not_those_of_texts(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, f"{CALL}get")
    body = agent.respond(tools=TOOLS, include=["message.output_text.logprobs"]).json()
    assert [each["token"] for each in body["output"][1]["content"][0]["logprobs"]] == ["g", "e", "t"]


def test_an_error_in_a_stream_fails_the_response(server: LiveServer) -> None:
    server.engine.fail_at = 2
    *_, last = typed_events_of(server.respond(stream=True))
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert "secret" not in last["response"]["error"]["message"]


@pytest.mark.parametrize(
    ("name", "says", "parameters"),
    [
        ("plain", 'a\u2028é\x85"\n', {}),
        ("empty", "", {}),
        ("length", "Hello", {"max_output_tokens": 2, "instructions": "Be brief.", "metadata": {"a": "b"}}),
        ("logprobs", "é!", {"include": ["message.output_text.logprobs"], "top_logprobs": 1}),
        ("tools", THOUGHT, {"tools": TOOLS}),
    ],
)
def test_the_bytes_of_a_stream_are_as_they_were(
    agent: LiveServer, name: str, says: str, parameters: dict[str, Any]
) -> None:
    """A difference is a change for every client: rewrite the golden file only when that is meant."""
    agent.engine.rule = saying_tokens(agent, says)
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


def test_who_leaves_a_stream_aborts(server: LiveServer) -> None:
    server.engine.hold_at = 3
    with server.client.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True}) as response:
        assert next(response.iter_bytes()).startswith(b"event: response.created\n")
    server.wait_until_idle()
    assert server.engine.finished == [FinishReason.ABORT]


# What is asked of the model.


def test_instructions_come_before_the_input(server: LiveServer) -> None:
    server.respond("Hi", instructions="Be brief.")
    assert prompt_of(server).split("[")[1:] == ["system]Be brief.", "user]Hi", "assistant]"]


def test_what_the_model_wrote_in_a_row_is_one_message(agent: LiveServer) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Well.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
        {"role": "assistant", "content": "A."},
        {"role": "assistant", "content": "B."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Oh."}]},
        {"type": "function_call", "call_id": "3", "name": "h", "arguments": ""},
    ]
    agent.respond(items)
    called = '<tool_call>{{"name": "{}", "arguments": {{}}}}</tool_call>'
    assert prompt_of(agent).split("[")[1:] == [
        "user]Hi",
        f"assistant](Hm.)Well.{called.format('f')}{called.format('g')}",
        "tool]one",
        "tool]two",
        "assistant]A.",
        "assistant]B.",
        f"assistant](Oh.){called.format('h')}",
        "assistant]",
    ]


def test_its_own_output_can_be_sent_back(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    output = agent.respond(tools=TOOLS).json()["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "7"}
        for item in output
        if item["type"] == "function_call"
    ]
    assert agent.respond([{"role": "user", "content": "Hi"}, *output, *results], tools=TOOLS).status_code == 200
    assert "(Hm.)Let me see.<tool_call>" in prompt_of(agent)


def test_parameters_reach_the_engine(server: LiveServer) -> None:
    server.respond(
        max_output_tokens=7, temperature=0.5, top_p=0.5, top_k=3, seed=5, stop="x", logit_bias={"3": 1}, priority=2,
        include=["message.output_text.logprobs"], top_logprobs=4,
    )  # fmt: skip
    request = server.engine.requests[-1]
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed) == (7, 0.5, 0.5, 3, 5)
    assert (params.stop, params.logit_bias, params.logprobs, request.priority) == (("x",), {3: 1.0}, 4, 2)


def test_without_a_limit_the_answer_may_fill_the_context(server: LiveServer) -> None:
    server.engine.rule = saying("Hello")
    server.respond()
    request = server.engine.requests[-1]
    assert request.params.max_tokens == 512 - len(request.prompt_token_ids)


def test_a_text_format_is_followed(server: LiveServer) -> None:
    server.engine.rule = saying("{}")
    body = server.respond(text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}).json()
    assert server.engine.requests[-1].params.grammar is not None
    assert body["text"]["format"]["schema"] == {"type": "object"}


def test_tools_are_told_to_the_model(agent: LiveServer) -> None:
    agent.respond(tools=TOOLS, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": TOOLS[1:]})
    assert '"name": "get_weather"' in prompt_of(agent)
    agent.respond(tools=TOOLS, tool_choice="none")
    assert "get_weather" not in prompt_of(agent)


def test_one_call_at_a_time_can_be_asked_for(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    output = agent.respond(tools=TOOLS, parallel_tool_calls=False).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]


def test_calls_can_be_required(server: LiveServer) -> None:
    server.respond(tools=TOOLS[1:], tool_choice="required", max_output_tokens=9)
    assert server.engine.requests[-1].params.grammar is not None


def test_what_the_template_knows_can_be_said(agent: LiveServer) -> None:
    agent.respond(chat_template_kwargs={"deep": True})
    assert prompt_of(agent).endswith("[assistant]<think>")


def test_thinking_can_be_bounded(agent: LiveServer) -> None:
    agent.respond(thinking_token_budget=4)
    thinking = agent.engine.requests[-1].params.thinking
    assert thinking is not None and thinking.max_tokens == 4


# What is refused.

IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
NAMED = {"type": "function", "name": "other"}
CALLED = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}


def tool(**keywords: Any) -> dict[str, Any]:
    return {"type": "function", "name": "f", "parameters": keywords}


def formatted(**keywords: Any) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "name": "x", "schema": keywords}}


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"\ud800": "a"}}, "metadata"),
        ({"metadata": {"a": "\ud800"}}, "metadata"),
        ({"input": []}, "input"),
        ({"input": 1}, "input"),
        ({"input": [IMAGE]}, "input.0.content.0"),
        ({"input": [{"role": "nobody", "content": ""}]}, "input.0.role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]}, "input.0.arguments"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.name"),
        ({"tools": [tool(maximum=math.inf)]}, "tools.0.parameters"),
        ({"tools": [tool(enum=[[math.nan]])]}, "tools.0.parameters"),
        ({"tools": [tool(properties={"\ud800": {}})]}, "tools.0.parameters"),
        ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": ALLOWED}, "tool_choice.tools.0.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}}, "text.format"),
        ({"text": formatted(maximum=-math.inf)}, "text.format.schema"),
        ({"text": formatted(maximum=math.inf), "tools": TOOLS, "tool_choice": "required"}, "text.format.schema"),
        ({"text": formatted(title="\ud800"), "tools": TOOLS, "tool_choice": "required"}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"formt": {"type": "json_object"}}}, "text.formt"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"reasoning": {"max_tokens": 10}}, "reasoning"),
        ({"thinking_token_budget": 3}, "thinking_token_budget"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(server: LiveServer, parameters: dict[str, Any], param: str) -> None:
    response = server.respond(**parameters)
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert param in error_of(response)["message"] and server.engine.requests == []


@pytest.mark.parametrize(
    ("parameters", "param", "message"),
    [
        ({"tools": TOOLS, "tool_choice": {**NAMED, "name": "messages"}}, "tool_choice.name", "'messages', which is"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "must not contain 'messages'"),
        ({"text": formatted(pattern="(messages")}, "text.format", "(messages"),
        ({"input": 129 * [CALLED]}, "input", "input: function calls in a row: List should have at most 128"),
    ],
)
def test_only_the_names_of_parameters_are_translated(
    server: LiveServer, parameters: dict[str, Any], param: str, message: str
) -> None:
    error = error_of(server.respond(**parameters))
    assert error["param"] == param and message in error["message"]


def test_values_that_ask_for_nothing_are_accepted(server: LiveServer) -> None:
    nothing = {"previous_response_id": None, "reasoning": {"effort": None}, "truncation": "disabled", "n": 1}
    nothing |= {"background": False, "store": True, "include": [], "tools": [], "tool_choice": "auto"}
    nothing |= {"parallel_tool_calls": True, "service_tier": "auto", "text": {"format": {"type": "text"}}}
    body = server.respond(max_output_tokens=2, **nothing).json()
    assert (body["store"], body["service_tier"]) == (False, "default")


def test_too_much_is_told_under_the_parameters_own_name(server: LiveServer) -> None:
    error = error_of(server.respond(max_output_tokens=5000))
    assert error["code"] == "context_length_exceeded" and "5000 in max_output_tokens" in error["message"]


def test_nothing_is_stored(server: LiveServer) -> None:
    body = server.respond(max_output_tokens=1).json()
    assert server.client.get(f"/v1/responses/{body['id']}").status_code == 404
