"""Tools and calls in prompts: in the model's own format, or in plain text where its template has none."""

import json
import re
from collections.abc import Callable

import pytest

from tests.server.events import first
from tests.server.fake_engine import saying
from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.server.model_talk import WEATHER, prompt_of
from tests.server.tools.call_templates import NAMED_IDS
from tests.server.tools.tool_chats import ONLY_TIME, TOOLS, TURNS, calls_in, function


def test_the_template_gets_the_tools(hermes: LiveServer) -> None:
    hermes.chat(tools=[function(description="Tell.", parameters=WEATHER, strict=False), function("get_time")])
    tools, end = json.JSONDecoder().raw_decode(prompt_of(hermes))
    assert prompt_of(hermes)[end:] == "[user]Hi[assistant]"
    assert tools == [
        function(description="Tell.", parameters=WEATHER),
        function("get_time", parameters={"type": "object", "properties": {}}),
    ]


def test_the_template_gets_all_tools_where_some_are_allowed(hermes: LiveServer) -> None:
    hermes.chat(tools=TOOLS, tool_choice=ONLY_TIME)
    assert "get_weather" in prompt_of(hermes)


def test_the_template_gets_no_tools_where_none_may_be_called(hermes: LiveServer) -> None:
    hermes.chat(tools=TOOLS, tool_choice="none")
    assert prompt_of(hermes) == "[user]Hi[assistant]"


HISTORY = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "tool_calls": [{"id": "c1", **function(arguments='{"city": "Bern"}')}]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]


def test_tools_are_plain_text_for_templates_without_tools() -> None:
    with live_server(FakeBackend(chat_templates={"default": TURNS})) as server:
        server.engine.rule = saying('{"name": "get_time", "arguments": {}}')
        choice = first(server.chat(tools=[function("get_time")]).json())
        assert calls_in(choice["message"]) == [("get_time", "{}")]
        system, rest = prompt_of(server).split("[user]")
        assert system.startswith("[system]You can call functions.") and '"name": "get_time"' in system
        assert rest == "Hi[assistant]"


REFUSED = "{{ raise_exception('No system.') if messages[0].role == 'system' }}"
LEFT_OUT = "{% set messages = messages | rejectattr('role', 'equalto', 'system') %}"


@pytest.mark.parametrize("template", [REFUSED + TURNS, LEFT_OUT + TURNS], ids=["refused", "left out"])
def test_without_system_messages_the_first_user_message_describes_tools(template: str) -> None:
    with live_server(FakeBackend(chat_templates={"default": template})) as server:
        assert server.chat(tools=[function("get_time")]).status_code == 200
        user = prompt_of(server)
        assert user.startswith("[user]You can call functions.") and user.endswith("\n\nHi[assistant]")


def test_calls_are_plain_text_for_templates_without_calls() -> None:
    with live_server(FakeBackend(chat_templates={"default": TURNS})) as server:
        server.chat(HISTORY)
        call = '[assistant]{"name": "get_weather", "arguments": {"city": "Bern"}}'
        assert prompt_of(server) == f"[user]Weather?{call}[user]Result of get_weather: sunny[assistant]"


def test_user_text_behind_results_is_in_the_same_turn() -> None:
    user = {"role": "user", "content": "And now?"}
    with live_server(FakeBackend(chat_templates={"default": TURNS})) as server:
        server.chat(
            [*HISTORY, user, {**HISTORY[-1], "content": "warm"}, {"role": "assistant", "content": "Nice."}, user]
        )
        results = "Result of get_weather: sunny\nAnd now?\nResult of get_weather: warm"
        assert prompt_of(server).endswith(f"[user]{results}[assistant]Nice.[user]And now?[assistant]")


CALLS = "{%% for m in messages %%}[{{ m.role }}]{%% for call in m.tool_calls or [] %%}%s{%% endfor %%}{%% endfor %%}"
EACH = "{% for key, value in call.function.arguments | items %}{{ key }}{% endfor %}"
OBJECT = "{{ raise_exception('No.') if call.function.arguments is not mapping }}"


@pytest.mark.parametrize("arguments", ['{"a": b}', '{"a": "b', "[1]", "1", " "])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CALLS % "{{ call.function.arguments | tojson }}", json.dumps),
        (CALLS % "{{ call.function.arguments }}", str),
        (CALLS % EACH, lambda _: ""),
        (CALLS % OBJECT, lambda _: ""),
        (TURNS.removesuffix("[assistant]"), '{{"name": "get_weather", "arguments": {}}}'.format),
    ],
    ids=["as JSON", "as it is", "each of them", "an object only", "no calls"],
)
def test_malformed_arguments_can_be_sent_back(arguments: str, template: str, expected: Callable[[str], str]) -> None:
    call = {"id": "c1", **function(arguments=arguments)}
    with live_server(FakeBackend(chat_templates={"default": template})) as server:
        assert server.chat([*HISTORY[:1], {"role": "assistant", "tool_calls": [call]}]).status_code == 200
        assert prompt_of(server).endswith(f"[assistant]{expected(arguments)}")


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


def test_ids_name_the_functions_where_the_template_writes_ids_only() -> None:
    calls = [{"id": each, **function("get_time", arguments="{}")} for each in ("c2", "c3")]
    history = [*HISTORY, {"role": "assistant", "tool_calls": calls}, HISTORY[-1] | {"tool_call_id": "c3"}]
    without_tools = NAMED_IDS.replace("tools | tojson", "''")
    template = "{% for m in messages %}{{ m.tool_call_id }}{% endfor %}" + without_tools
    with live_server(FakeBackend(chat_templates={"default": template})) as server:
        server.engine.rule = saying('So:<|calls|><|call|>functions.get_time:3<|args|>{"a": 1}<|/call|><|/calls|>')
        message = first(server.chat(history, tools=[function("get_time")]).json())["message"]
        assert (message["content"], calls_in(message)) == ("So:", [("get_time", '{"a": 1}')])
        assert re.fullmatch("call_[0-9a-f]+", message["tool_calls"][0]["id"])
        weather, first_time, second_time = (f"functions.get_{each}" for each in ("weather:0", "time:1", "time:2"))
        written = re.findall("functions.[a-z_]+:[0-9]", prompt_of(server))
        assert written == [weather, second_time, weather, first_time, second_time]
