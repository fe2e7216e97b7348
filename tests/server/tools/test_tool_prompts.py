"""What the model is told of tools and calls: in its own format, or in plain text where it knows none."""

import json
import re
from collections.abc import Callable

import pytest

from tests.server.events import first
from tests.server.fake_engine import saying
from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.server.model_talk import WEATHER, prompt_of
from tests.server.tools.tool_chats import ONLY_TIME, TOOLS, TURNS, calls_in, function


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


REFUSED = "{{ raise_exception('No system.') if messages[0].role == 'system' }}"
LEFT_OUT = "{% set messages = messages | rejectattr('role', 'equalto', 'system') %}"


@pytest.mark.parametrize("template", [REFUSED + TURNS, LEFT_OUT + TURNS], ids=["refused", "left out"])
def test_without_system_messages_the_first_user_is_told_of_tools(template: str) -> None:
    with live_server(FakeBackend(chat_templates={"default": template})) as server:
        assert server.chat(tools=[function("get_time")]).status_code == 200
        user = prompt_of(server)
        assert user.startswith("[user]You can call functions.") and user.endswith("\n\nHi[assistant]")


def test_templates_that_know_no_calls_are_told_of_them_in_plain_text() -> None:
    with live_server(FakeBackend(chat_templates={"default": TURNS})) as server:
        server.chat(HISTORY)
        call = '[assistant]{"name": "get_weather", "arguments": {"city": "Bern"}}'
        assert prompt_of(server) == f"[user]Weather?{call}[user]Result of get_weather: sunny[assistant]"


def test_what_the_user_says_with_results_is_told_in_the_same_turn() -> None:
    say = {"role": "user", "content": "And now?"}
    with live_server(FakeBackend(chat_templates={"default": TURNS})) as server:
        server.chat([*HISTORY, say, {**HISTORY[-1], "content": "warm"}, {"role": "assistant", "content": "Nice."}, say])
        results = "Result of get_weather: sunny\nAnd now?\nResult of get_weather: warm"
        assert prompt_of(server).endswith(f"[user]{results}[assistant]Nice.[user]And now?[assistant]")


CALLS = "{%% for m in messages %%}[{{ m.role }}]{%% for call in m.tool_calls or [] %%}%s{%% endfor %%}{%% endfor %%}"
EACH = "{% for key, value in call.function.arguments | items %}{{ key }}{% endfor %}"
OBJECT = "{{ raise_exception('No.') if call.function.arguments is not mapping }}"


@pytest.mark.parametrize("arguments", ['{"a": b}', '{"a": "b', "[1]", "1", " "])
@pytest.mark.parametrize(
    ("template", "told"),
    [
        (CALLS % "{{ call.function.arguments | tojson }}", json.dumps),
        (CALLS % "{{ call.function.arguments }}", str),
        (CALLS % EACH, lambda _: ""),
        (CALLS % OBJECT, lambda _: ""),
        (TURNS.removesuffix("[assistant]"), '{{"name": "get_weather", "arguments": {}}}'.format),
    ],
    ids=["as JSON", "as it is", "each of them", "an object only", "no calls"],
)
def test_what_was_written_amiss_can_be_sent_back(arguments: str, template: str, told: Callable[[str], str]) -> None:
    call = {"id": "c1", **function(arguments=arguments)}
    with live_server(FakeBackend(chat_templates={"default": template})) as server:
        assert server.chat([*HISTORY[:1], {"role": "assistant", "tool_calls": [call]}]).status_code == 200
        assert prompt_of(server).endswith(f"[assistant]{told(arguments)}")


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
