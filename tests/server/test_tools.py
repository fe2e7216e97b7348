"""Tools and thinking in chat: what clients ask for, what the model is told, and what clients are told."""

import json
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from engine.client import GenerationRequest
from engine.thinking import Thinking
from server.tools.formats import HERMES as HERMES_FORMAT
from server.tools.formats import LLAMA
from tests.engine.grammars import accepted
from tests.server.byte_tokenizer import EOS
from tests.server.events import chunks_of, error_of
from tests.server.fake_engine import saying
from tests.server.live_server import FakeBackend, LiveServer, live_server

GOLDEN = Path(__file__).parent / "golden"
TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
HERMES = "{{ tools | tojson if tools }}{# <tool_call> tool_calls #}" + TURNS
THINKING = TURNS + "{% if deep %}<think>\n{% endif %}"
MARKS = {"<tool_call>": 0xF8, "</tool_call>": 0xF9, "<think>": 0xFA, "</think>": 0xFB}

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def function(name: str = "get_weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


TOOLS = [function(parameters=WEATHER), function("get_time")]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
CALLS = "Let me see.\n" + CALL + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def shared_hermes(no_settings_from_outside: None) -> Generator[LiveServer, None, None]:
    with live_server(FakeBackend(chat_templates={"default": HERMES}, special_tokens=MARKS)) as server:
        yield server


@pytest.fixture
def hermes(shared_hermes: LiveServer) -> LiveServer:
    """Its marks are special tokens."""
    shared_hermes.engine.reset()
    return shared_hermes


@pytest.fixture(scope="module")
def shared_thinker(no_settings_from_outside: None) -> Generator[LiveServer, None, None]:
    with live_server(FakeBackend(chat_templates={"default": THINKING}, special_tokens=MARKS)) as server:
        yield server


@pytest.fixture
def thinker(shared_thinker: LiveServer) -> LiveServer:
    shared_thinker.engine.reset()
    return shared_thinker


def saying_tokens(server: LiveServer, text: str) -> Callable[[GenerationRequest, int], int]:
    """Says the text with the special tokens in it."""
    ids = [*server.engine.tokenizer.encode(text, add_special_tokens=False), EOS]
    return lambda _, position: ids[position]


def first(body: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = body["choices"][0]
    return choice


def prompt_of(server: LiveServer) -> str:
    tokenizer = server.engine.tokenizer
    return tokenizer.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def calls_in(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


# What clients are told.


def test_calls_are_told_apart_from_content(hermes: LiveServer) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALLS)
    choice = first(hermes.chat(tools=TOOLS).json())
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see.\n"
    assert calls_in(choice["message"]) == [("get_weather", '{"city": "Zürich"}'), ("get_time", "{}")]
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2


def test_content_beside_nothing_but_calls_is_null(hermes: LiveServer) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALL)
    assert first(hermes.chat(tools=TOOLS).json())["message"]["content"] is None


def test_marks_that_are_no_special_tokens_are_read_too(hermes: LiveServer) -> None:
    hermes.engine.rule = saying(CALL)
    assert len(first(hermes.chat(tools=TOOLS).json())["message"]["tool_calls"]) == 1


def test_a_call_that_max_tokens_cuts_off_ends_with_length(hermes: LiveServer) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALL)
    choice = first(hermes.chat(tools=TOOLS, max_tokens=50).json())
    assert choice["finish_reason"] == "length"
    assert calls_in(choice["message"])[0][1].startswith('{"ci')


def test_a_stop_string_cuts_a_call_off(hermes: LiveServer) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALL)
    choice = first(hermes.chat(tools=TOOLS, stop="Zü").json())
    assert choice["finish_reason"] == "stop"
    assert (choice["stop_reason"], calls_in(choice["message"])) == ("Zü", [("get_weather", '{"city": "')])


def test_only_one_call_is_told_where_one_was_asked_for(hermes: LiveServer) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALLS)
    message = first(hermes.chat(tools=TOOLS, parallel_tool_calls=False).json())["message"]
    assert [name for name, _ in calls_in(message)] == ["get_weather"]


ONLY_TIME = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function("get_time")]}}


@pytest.mark.parametrize("choice", ["none", ONLY_TIME])
def test_text_that_looks_like_a_call_of_what_may_not_be_called_is_content(hermes: LiveServer, choice: Any) -> None:
    hermes.engine.rule = saying(CALL)
    body = hermes.chat(tools=TOOLS, tool_choice=choice).json()
    assert first(body)["message"]["content"] == CALL and first(body)["finish_reason"] == "stop"


def test_without_tools_nothing_is_a_call(hermes: LiveServer) -> None:
    hermes.engine.rule = saying(CALL)
    assert first(hermes.chat().json())["message"]["content"] == CALL


def test_marks_are_shown_only_where_they_are_looked_for(hermes: LiveServer) -> None:
    for parameters in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS}):
        hermes.chat(**parameters)
    shown = [request.params.shown_token_ids for request in hermes.engine.requests]
    assert shown == [(), (), (MARKS["<tool_call>"], MARKS["</tool_call>"])]


def test_each_choice_has_its_own_calls(hermes: LiveServer) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALL)
    choices = hermes.chat(tools=TOOLS, n=3).json()["choices"]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3


def test_ids_of_calls_are_those_of_the_request(hermes: LiveServer) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALL)

    def id_of(request_id: str) -> str:
        message = first(hermes.chat(tools=TOOLS, headers={"X-Request-Id": request_id}).json())["message"]
        return str(message["tool_calls"][0]["id"])

    assert re.fullmatch("call_[0-9a-f]{24}", id_of("a"))
    assert id_of("a") == id_of("a") != id_of("b")


def added_up(server: LiveServer, **parameters: Any) -> dict[str, Any]:
    """A stream's message, put together as clients do."""
    message: dict[str, Any] = {"role": None, "content": "", "reasoning_content": "", "tool_calls": {}}
    for chunk in chunks_of(server.chat(stream=True, **parameters)):
        delta = first(chunk)["delta"]
        for name in ("role", "content", "reasoning_content"):
            message[name] = (message[name] or "") + delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            known = message["tool_calls"].setdefault(call["index"], call)
            assert ("id" in call) is (known is call)
            if known is not call:
                known["function"]["arguments"] += call["function"]["arguments"]
    return message


def test_a_stream_adds_up_to_the_whole_message(hermes: LiveServer) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALLS)
    headers = {"X-Request-Id": "same"}
    whole = first(hermes.chat(tools=TOOLS, headers=headers).json())["message"]
    streamed = added_up(hermes, tools=TOOLS, headers=headers)
    assert streamed["content"] == whole["content"]
    assert [{**call, "index": None} for call in streamed["tool_calls"].values()] == [
        {**call, "index": None} for call in whole["tool_calls"]
    ]


def exact_bytes(server: LiveServer, **parameters: Any) -> bytes:
    """The body as it came, times and the backend's fingerprint replaced."""
    body = server.chat(seed=1, headers={"X-Request-Id": "golden"}, **parameters).content
    return re.sub(rb'"created":\d+', b'"created":0', re.sub(rb"fp_[0-9a-f]{10}", b"fp_0", body))


@pytest.mark.parametrize(("name", "stream"), [("chat_tools.sse", True), ("chat_tools.json", False)])
def test_the_bytes_of_calls_are_as_they_were(hermes: LiveServer, name: str, stream: bool) -> None:
    hermes.engine.rule = saying_tokens(hermes, "So" + CALL)
    assert exact_bytes(hermes, tools=TOOLS, stream=stream) == (GOLDEN / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("chat_thinking.sse", {"stream": True, "stream_options": {"include_usage": True}}), ("chat_thinking.json", {})],
)
def test_the_bytes_of_thinking_are_as_they_were(thinker: LiveServer, name: str, parameters: dict[str, Any]) -> None:
    thinker.engine.rule = saying_tokens(thinker, "<think>hm</think>\n\nYes")
    assert exact_bytes(thinker, **parameters) == (GOLDEN / name).read_bytes()


def test_the_official_client_adds_calls_up(hermes: LiveServer) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALLS)
    with OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Hi"}]
        with client.chat.completions.stream(model="fake", messages=messages, tools=TOOLS) as stream:  # type: ignore[arg-type]
            events = [event.type for event in stream]
            message = stream.get_final_completion().choices[0].message
    assert events.count("tool_calls.function.arguments.done") == 2
    assert [json.loads(call.function.arguments) for call in message.tool_calls or []] == [{"city": "Zürich"}, {}]


# What the model is told.


def test_the_template_is_told_of_tools(hermes: LiveServer) -> None:
    hermes.chat(tools=[function(description="Tell.", parameters=WEATHER, strict=False), function("get_time")])
    told, end = json.JSONDecoder().raw_decode(prompt_of(hermes))
    assert prompt_of(hermes)[end:] == "[user]Hi[assistant]"
    assert told == [
        function(description="Tell.", parameters=WEATHER),
        function("get_time", parameters={"type": "object", "properties": {}}),
    ]


def test_the_template_is_told_of_all_tools_where_some_are_allowed(hermes: LiveServer) -> None:
    hermes.chat(tools=TOOLS, tool_choice=ONLY_TIME)
    assert "get_weather" in prompt_of(hermes)


def test_nobody_is_told_of_tools_that_may_not_be_called(hermes: LiveServer) -> None:
    hermes.chat(tools=TOOLS, tool_choice="none")
    assert prompt_of(hermes) == "[user]Hi[assistant]"


HISTORY = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "tool_calls": [{"id": "c1", **function(arguments='{"city": "Bern"}')}]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]


def test_templates_that_know_no_tools_are_told_in_plain_text() -> None:
    with live_server(FakeBackend(chat_templates={"default": TURNS})) as server:
        server.engine.rule = saying('{"name": "get_time", "arguments": {}}')
        choice = first(server.chat(tools=[function("get_time")]).json())
        assert calls_in(choice["message"]) == [("get_time", "{}")]
        system, rest = prompt_of(server).split("[user]")
        assert system.startswith("[system]You can call functions.") and '"name": "get_time"' in system
        assert rest == "Hi[assistant]"


def test_templates_that_know_no_calls_are_told_of_them_in_plain_text() -> None:
    with live_server(FakeBackend(chat_templates={"default": TURNS})) as server:
        server.chat(HISTORY)
        call = '[assistant]{"name": "get_weather", "arguments": {"city": "Bern"}}'
        assert prompt_of(server) == f"[user]Weather?{call}[user]Result of get_weather: sunny[assistant]"


def test_only_the_assistant_calls() -> None:
    with live_server(FakeBackend(chat_templates={"default": TURNS})) as server:
        message = {"role": "user", "content": "x", "tool_calls": [1]}
        assert server.chat([message, {**message, "role": "system"}]).status_code == 200
        assert prompt_of(server) == "[user]x[system]x[assistant]"


def test_mistral_gets_the_ids_it_wants() -> None:
    template = "{{ tools | tojson if tools }}{# [TOOL_CALLS] tool_calls #}" + TURNS
    with live_server(FakeBackend(chat_templates={"default": template})) as server:
        server.engine.rule = saying('[TOOL_CALLS] [{"name": "get_time", "arguments": {}}]')
        message = first(server.chat(tools=TOOLS).json())["message"]
    assert re.fullmatch("[0-9a-f]{9}", message["tool_calls"][0]["id"])


# Thinking.


def test_thinking_is_told_apart_and_counted(thinker: LiveServer) -> None:
    thinker.engine.rule = saying_tokens(thinker, "<think>hm</think>\n\nYes")
    body = thinker.chat().json()
    assert first(body)["message"]["reasoning_content"] == "hm" and first(body)["message"]["content"] == "Yes"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_thinking_that_the_prompt_began_needs_no_mark(thinker: LiveServer) -> None:
    thinker.engine.rule = saying_tokens(thinker, "hm</think>Yes")
    body = thinker.chat(chat_template_kwargs={"deep": True}).json()
    assert first(body)["message"]["reasoning_content"] == "hm" and first(body)["message"]["content"] == "Yes"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_tokens_of_thinking_count_although_their_text_is_held_back(thinker: LiveServer) -> None:
    """Here each token's text comes with the next one's, for it may begin the stop string."""
    thinker.engine.rule = saying_tokens(thinker, "<think>aaa</think>Yes")
    body = thinker.chat(stop=["aX", "YX", "</think>X"]).json()
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}


def test_thinking_of_all_choices_is_counted(thinker: LiveServer) -> None:
    thinker.engine.rule = saying_tokens(thinker, "<think>hm</think>Yes")
    assert thinker.chat(n=2).json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 8}


def test_a_model_that_does_not_think_says_what_it_says(server: LiveServer) -> None:
    server.engine.rule = saying("<think>hm</think>Yes")
    body = server.chat().json()
    assert first(body)["message"]["content"] == "<think>hm</think>Yes"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_budget_of_thinking_reaches_the_engine(thinker: LiveServer) -> None:
    thinker.chat(thinking_token_budget=7)
    thinker.chat(thinking_token_budget=0, chat_template_kwargs={"deep": True})
    wanted = [Thinking(max_tokens=7, start_id=0xFA, end_id=0xFB), Thinking(max_tokens=0, end_id=0xFB)]
    assert [request.params.thinking for request in thinker.engine.requests] == wanted


def test_a_budget_is_refused_where_it_could_not_be_kept(server: LiveServer) -> None:
    error = error_of(server.chat(thinking_token_budget=7))
    assert error["param"] == "thinking_token_budget" and "does not think" in error["message"]
    with live_server(FakeBackend(chat_templates={"default": THINKING})) as other:
        assert "no tokens" in error_of(other.chat(thinking_token_budget=7))["message"]
        assert error_of(other.chat(thinking_token_budget=-1))["param"] == "thinking_token_budget"


# The settings.


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3", '{"name": "get_time", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS]get_time[ARGS]{}"),
        ("hermes", CALL),
    ],
)
def test_the_format_can_be_set(parser: str, text: str) -> None:
    with live_server(FakeBackend(chat_templates={"default": HERMES}), tool_call_parser=parser) as server:
        server.engine.rule = saying(text)
        assert first(server.chat(tools=TOOLS).json())["finish_reason"] == "tool_calls"


def test_tools_are_refused_where_calls_could_not_be_read() -> None:
    backends = [(FakeBackend(chat_templates={"default": "{{ tools }}" + TURNS}), "auto"), (FakeBackend(), "none")]
    for backend, parser in backends:
        with live_server(backend, tool_call_parser=parser) as server:
            error = error_of(server.chat(tools=TOOLS))
            assert error["param"] == "tools" and "--tool-call-parser" in error["message"]
            assert server.chat(tools=TOOLS, tool_choice="none").status_code == 200


def test_thinking_can_be_set() -> None:
    with live_server(reasoning_parser="think") as server:
        server.engine.rule = saying("<think>hm</think>Yes")
        assert first(server.chat().json())["message"]["reasoning_content"] == "hm"
    with live_server(FakeBackend(chat_templates={"default": THINKING}), reasoning_parser="none") as server:
        server.engine.rule = saying("<think>hm</think>Yes")
        assert first(server.chat().json())["message"]["content"] == "<think>hm</think>Yes"


# What is refused.

DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"properties": {"x": DEEP}}


@pytest.mark.parametrize(
    ("param", "parameters"),
    [
        ("tools", {"tools": {}}),
        ("tools", {"tools": [function(f"f{index}") for index in range(129)]}),
        ("tools", {"tools": [function(f"f{index}", description="x" * 2**18) for index in range(5)]}),
        ("tools.0.type", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
        ("tools.0.type", {"tools": [{"function": {"name": "f"}}]}),
        ("tools.0.function", {"tools": [{"type": "function"}]}),
        ("tools.0.function.name", {"tools": [{"type": "function", "function": {}}]}),
        ("tools.1.function.name", {"tools": [function(), function("a b")]}),
        ("tools.0.function.name", {"tools": [function("x" * 65)]}),
        ("tools.0.function.name", {"tools": [function("f\n")]}),
        ("tools.1.function.name", {"tools": [function(), function()]}),
        ("tools.0.function.description", {"tools": [function(description=1)]}),
        ("tools.0.function.strict", {"tools": [function(strict="yes")]}),
        ("tools.0.function.parameters", {"tools": [function(parameters=[])]}),
        ("tools.0.function.parameters", {"tools": [function(parameters={"type": "string"})]}),
        ("tools.0.function.parameters", {"tools": [function(parameters=DEEP)]}),
        ("tools.0.function.parameters", {"tools": [function(parameters={"properties": {"\ud800": {}}})]}),
        ("tools.0.function.parameters", {"tools": [function(parameters={"enum": ["a", ["\0"]]})]}),
        ("tool_choice", {"tool_choice": "auto"}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": function(), "tools": []}),
        ("tool_choice", {"tool_choice": "any", "tools": TOOLS}),
        ("tool_choice", {"tool_choice": 1, "tools": TOOLS}),
        ("tool_choice.type", {"tool_choice": {"type": "custom", "custom": {"name": "f"}}, "tools": TOOLS}),
        ("tool_choice.function", {"tool_choice": {"type": "function"}, "tools": TOOLS}),
        ("tool_choice.function.name", {"tool_choice": function("f"), "tools": TOOLS}),
        (
            "tool_choice.allowed_tools.mode",
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": TOOLS}}, "tools": TOOLS},
        ),
        (
            "tool_choice.allowed_tools.tools.0.function.name",
            {
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function("f")]}},
                "tools": TOOLS,
            },
        ),
        ("parallel_tool_calls", {"parallel_tool_calls": True}),
        ("parallel_tool_calls", {"parallel_tool_calls": 1, "tools": TOOLS}),
        ("functions", {"functions": [{"name": "f"}]}),
        ("function_call", {"function_call": "auto"}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"tools": []}}),
    ],
)
def test_what_cannot_be_is_refused_by_its_place(server: LiveServer, param: str, parameters: dict[str, Any]) -> None:
    response = server.chat(**parameters)
    assert response.status_code == 400 and error_of(response)["param"] == param
    assert len(response.text) < 500


def test_arguments_in_the_history_must_be_json(server: LiveServer) -> None:
    for arguments in ("{", "[]", "1"):
        call = {"id": "c1", **function(arguments=arguments)}
        error = error_of(server.chat([{"role": "assistant", "tool_calls": [call]}]))
        assert error["param"] == "messages.0.tool_calls.0.function.arguments"


@pytest.mark.parametrize("parameters", [{"tools": []}, {"tools": None}, {"tools": [], "tool_choice": "none"}])
def test_no_tools_are_no_tools(server: LiveServer, parameters: dict[str, Any]) -> None:
    assert server.chat(**parameters).status_code == 200


# What is guaranteed.


@pytest.fixture(scope="module")
def shared_plain_marks(no_settings_from_outside: None) -> Generator[LiveServer, None, None]:
    with live_server(FakeBackend(chat_templates={"default": HERMES + "{% if deep %}<think>{% endif %}"})) as server:
        yield server


@pytest.fixture
def caller(shared_plain_marks: LiveServer) -> LiveServer:
    """Its marks are text. It thinks."""
    shared_plain_marks.engine.reset()
    return shared_plain_marks


def grammar(server: LiveServer, **parameters: Any) -> str:
    """What the engine is told."""
    response = server.chat(**{"tools": TOOLS, **parameters})
    assert response.status_code == 200, response.text
    return server.engine.requests[-1].params.grammar or ""


WEATHER_CALL = HERMES_FORMAT.spelling.of([("get_weather", '{"city": "x"}')])
TIME_CALL = HERMES_FORMAT.spelling.of([("get_time", "{}")])
BAD_CALL = HERMES_FORMAT.spelling.of([("get_weather", '{"city": 1}')])
TWO_CALLS = HERMES_FORMAT.spelling.of([("get_time", "{}"), ("get_weather", '{"city": "x"}')])
TEXTS = ["Hello", WEATHER_CALL, TIME_CALL, BAD_CALL, TWO_CALLS, f"So {TIME_CALL}"]
REQUIRED_TIME = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function("get_time")]}}
STRICT = [function(parameters=WEATHER, strict=True), function("get_time")]


@pytest.mark.parametrize(
    ("parameters", "texts"),
    [
        ({"tool_choice": "required"}, [WEATHER_CALL, TIME_CALL, TWO_CALLS]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [WEATHER_CALL, TIME_CALL]),
        ({"tool_choice": function()}, [WEATHER_CALL]),
        ({"tool_choice": REQUIRED_TIME}, [TIME_CALL]),
        ({"tools": STRICT}, ["Hello", WEATHER_CALL, TIME_CALL, TWO_CALLS, f"So {TIME_CALL}", "{}"]),
        ({"tools": STRICT, "parallel_tool_calls": False}, ["Hello", WEATHER_CALL, TIME_CALL, f"So {TIME_CALL}", "{}"]),
        ({"response_format": {"type": "json_object"}}, [WEATHER_CALL, TIME_CALL, TWO_CALLS, "{}"]),
        ({"response_format": {"type": "json_object"}, "tool_choice": "none"}, ["{}"]),
        ({"response_format": {"type": "json_object"}, "tool_choice": function("get_time")}, [TIME_CALL]),
    ],
)
def test_calls_follow_what_was_asked_for(caller: LiveServer, parameters: dict[str, Any], texts: list[str]) -> None:
    told = grammar(caller, **parameters)
    assert accepted(told, *TEXTS, "{}") == texts
    thought = "<think>Hm.\n</think>\n\n"
    assert accepted(told, *(thought + text for text in texts)) == [thought + text for text in texts]


def test_calls_follow_after_the_thinking_that_the_prompt_began(caller: LiveServer) -> None:
    told = grammar(caller, tool_choice="required", chat_template_kwargs={"deep": True})
    assert accepted(told, TIME_CALL, f"hm</think>\n{TIME_CALL}", "hm</think>") == [f"hm</think>\n{TIME_CALL}"]


def test_what_is_left_to_the_model_needs_no_grammar(caller: LiveServer) -> None:
    assert grammar(caller) == grammar(caller, tool_choice="auto") == ""
    assert grammar(caller, tool_choice=ONLY_TIME, tools=STRICT) == ""
    assert grammar(caller, tool_choice="none", tools=STRICT) == ""


def test_calls_that_are_forced_are_told_as_calls(caller: LiveServer) -> None:
    caller.engine.rule = saying(TWO_CALLS)
    choice = first(caller.chat(tools=TOOLS, tool_choice="required").json())
    assert calls_in(choice["message"]) == [("get_time", "{}"), ("get_weather", '{"city": "x"}')]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"


def test_calls_can_be_forced_where_marks_are_special_tokens(hermes: LiveServer) -> None:
    assert accepted(grammar(hermes, tool_choice="required"), *TEXTS) == [WEATHER_CALL, TIME_CALL, TWO_CALLS]


def test_strictness_is_refused_where_marks_are_special_tokens(hermes: LiveServer) -> None:
    error = error_of(hermes.chat(tools=[function("get_time"), function(strict=True)]))
    assert error["param"] == "tools.1.function.strict" and "required" in error["message"]


def test_calls_without_a_mark_can_be_strict() -> None:
    with live_server(FakeBackend(chat_templates={"default": "{{ tools }} <|python_tag|>" + TURNS})) as llama:
        told = grammar(llama, tools=STRICT)
    texts = ["Hello", LLAMA.spelling.of([("get_weather", '{"city": "x"}')])]
    assert accepted(told, *texts, LLAMA.spelling.of([("get_weather", "{}")]), "{}") == texts


@pytest.mark.parametrize(
    ("place", "schema"),
    [
        ("/properties/a/not", {"type": "object", "properties": {"a": {"not": {}}}}),
        ("$ref", {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1/x"}}}),
        ("unclosed", {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_by_its_place(caller: LiveServer, place: str, schema: Any) -> None:
    for parameters in ({"tool_choice": "required"}, {}, {"response_format": {"type": "json_object"}}):
        tools = [*TOOLS, function("f", parameters=schema, strict=not parameters)]
        error = error_of(caller.chat(tools=tools, **parameters))
        assert error["param"] == "tools.2.function.parameters" and place in error["message"], error
    assert caller.chat(tools=[function("f", parameters=schema)]).status_code == 200


def test_a_schema_that_need_not_be_followed_is_not_blamed(caller: LiveServer) -> None:
    wrong = {"type": "object", "properties": {"a": {"not": {}}}}
    tools = [function("f", parameters=wrong), function("g", parameters=wrong, strict=True)]
    assert error_of(caller.chat(tools=tools))["param"] == "tools.1.function.parameters"
    demand = {"type": "json_schema", "json_schema": {"name": "x", "schema": wrong}}
    assert error_of(caller.chat(tools=TOOLS, response_format=demand))["param"] == "response_format"


def test_thinking_with_special_marks_stands_in_the_way_of_guarantees(thinker: LiveServer) -> None:
    error = error_of(thinker.chat(tools=[function("get_time")], tool_choice="required", max_tokens=5))
    assert error["param"] == "tool_choice" and "cannot be combined" in error["message"]
