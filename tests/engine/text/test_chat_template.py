"""Chat templates render as in transformers, and keep to their limits of time, size and access."""

import asyncio
import signal
import sys
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.core.errors import InvalidParameterError
from engine.text import chat_template, template_sandbox
from engine.text.chat_template import ChatTemplate, Conversation
from engine.text.template_sandbox import render_isolated
from tests.engine.text.sample_templates import TEMPLATES

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "  Hé <b>\n"}
ASSISTANT = {"role": "assistant", "content": " Yes, \n"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "é<", "y": [1, None]}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "several": [USER, ASSISTANT, {"role": "user", "content": "So?"}],
    "system": [{"role": "system", "content": "Be brief. "}, USER, ASSISTANT],
    "thinking": [USER, {"role": "assistant", "content": "Hm", "reasoning_content": "Let me see"}],
    "thought": [USER, {"role": "assistant", "content": "<think>\nwell\n</think>\nHm"}],
    "tools": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **fields: Any) -> str:
    return ChatTemplate(source).render(
        Conversation(messages=[USER] if messages is None else messages, **fields), TOKENS
    )


def theirs(source: str, messages: list[dict[str, Any]], **parameters: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=source, **TOKENS, **parameters)
    return str(rendered[0])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("opens_turn", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_render_as_in_transformers(
    name: str, conversation: str, opens_turn: bool, tools: list[dict[str, Any]] | None
) -> None:
    messages, source = CONVERSATIONS[conversation], TEMPLATES[name]
    expected = theirs(source, messages, tools=tools, add_generation_prompt=opens_turn, enable_thinking=False)
    variables = {"enable_thinking": False}
    assert render(source, messages, tools=tools, add_generation_prompt=opens_turn, variables=variables) == expected


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_goes_by_all_its_names(name: str) -> None:
    source = "{{ messages[0].reasoning_content }} {{ messages[0].thinking }}"
    messages = [{"role": "assistant", "content": "", name: "hm"}]
    assert render(source, messages) == theirs(source, messages) == "hm hm"


@pytest.mark.parametrize("source", ["{{ messages[0].content.strip() }}", *TEMPLATES.values()])
@pytest.mark.parametrize("text", ["Yes, because ", "Yes", "Yes\n\n"])
def test_a_continued_message_is_the_end_of_the_prompt(source: str, text: str) -> None:
    message = {"role": "assistant", "content": text}
    messages = [message] if "strip()" in source else [USER, message]
    prompt = render(source, messages, continue_final_message=True)
    assert prompt.endswith(text)
    assert prompt.rstrip() == theirs(source, messages, continue_final_message=True).rstrip()


def test_the_last_of_several_parts_is_continued() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]
    messages = [{"role": "assistant", "content": parts}]
    source = "{% for part in messages[0].content %}{{ part.text }};{% endfor %}"
    assert render(source, messages, continue_final_message=True) == "a;b "
    assert "continue" not in str(parts)


def test_a_text_may_contain_what_marks_its_end() -> None:
    text = f"a {chat_template._END_OF_MESSAGE} b"
    assert (
        render("{{ messages[0].content }};", [{"role": "user", "content": text}], continue_final_message=True) == text
    )


@pytest.mark.parametrize("way", [" | upper", "[:3]", " | replace('é', 'e')", " * 0"])
def test_a_message_that_the_template_changes_cannot_be_continued(way: str) -> None:
    with pytest.raises(InvalidParameterError, match="cannot be continued"):
        render("{{ messages[0].content" + way + " }}", continue_final_message=True)


@pytest.mark.parametrize("content", [None, [], [{"type": "image"}]])
def test_a_message_without_text_cannot_be_continued(content: object) -> None:
    with pytest.raises(InvalidParameterError, match="no text"):
        render("{{ messages }}", [{"role": "assistant", "content": content}], continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('alternate!') }}", "alternate!"),
        ("{{ nothing.here }}", "undefined"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.mro() }}", "unsafe"),
        ("{{ namespace(__class__=1) }}", "underscore"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "underscore"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ '\0' }}", "null characters"),
        ("{{ '%c' % 55296 }}", "surrogates"),
        ("{% include 'etc' %}", "loader"),
    ],
)
def test_what_a_template_refuses_is_an_error_with_its_reason(source: str, reason: str) -> None:
    with pytest.raises(InvalidParameterError, match=reason) as refusal:
        render(source)
    assert refusal.value.param == "messages"


@pytest.mark.parametrize("source", ["{% if %}", "{{ x | no_such_filter }}", "{% unknown %}", "{{ " + "(" * 9999])
def test_what_is_no_template_is_refused(source: str) -> None:
    with pytest.raises(InvalidParameterError, match="not valid") as refusal:
        ChatTemplate(source)
    assert refusal.value.param == "chat_template"


def test_long_error_messages_are_cut() -> None:
    with pytest.raises(InvalidParameterError) as refusal:
        render("{{ raise_exception('x' * 9999) }}")
    assert len(str(refusal.value)) < 600


def test_a_prompt_cannot_grow_without_end() -> None:
    with pytest.raises(InvalidParameterError, match="characters"):
        render("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}")


def test_rendering_cannot_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.0)
    with pytest.raises(InvalidParameterError, match="seconds"):
        render("{% for i in range(99999) %}x{% endfor %}")


def test_a_conversations_own_fields_cannot_be_replaced() -> None:
    source = "{{ messages | length }}{{ add_generation_prompt }}"
    assert render(source, variables={"messages": [], "add_generation_prompt": True}) == "1False"


class TestIsolated:
    def isolated(self, source: str) -> str:
        return asyncio.run(render_isolated(source, Conversation(messages=[USER], variables={"x": "\ud800"}), TOKENS))

    @pytest.mark.parametrize("ends_by", ["leaving", "time"])
    def test_its_process_ends_with_it(self, monkeypatch: pytest.MonkeyPatch, ends_by: str) -> None:
        monkeypatch.setattr(template_sandbox, "COMMAND", (sys.executable, "-c", "import time; time.sleep(1000)"))
        started: list[asyncio.subprocess.Process] = []
        start = asyncio.create_subprocess_exec

        async def noting_start(*command: str, **options: Any) -> asyncio.subprocess.Process:
            started.append(await start(*command, **options))
            return started[0]

        async def check() -> None:
            rendering = asyncio.create_task(render_isolated("x", Conversation(messages=[USER]), TOKENS))
            while not started:
                await asyncio.sleep(0.001)
            if ends_by == "leaving":
                rendering.cancel()
            await asyncio.wait([rendering])
            assert rendering.cancelled() == (ends_by == "leaving")
            assert started[0].returncode == -signal.SIGKILL

        monkeypatch.setattr(asyncio, "create_subprocess_exec", noting_start)
        monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2 if ends_by == "time" else 1000)
        asyncio.run(check())

    def test_it_renders_the_same(self) -> None:
        assert self.isolated(TEMPLATES["turns"]) == render(TEMPLATES["turns"])

    @pytest.mark.parametrize(
        ("source", "param"), [("{% if %}", "chat_template"), ("{{ raise_exception('no') }}{{ x }}", "messages")]
    )
    def test_it_refuses_the_same(self, source: str, param: str) -> None:
        with pytest.raises(InvalidParameterError) as refusal:
            self.isolated(source)
        with pytest.raises(InvalidParameterError) as same:
            render(source)
        assert (str(refusal.value), refusal.value.param) == (
            str(same.value),
            same.value.param,
        ) and param == same.value.param

    @pytest.mark.parametrize(
        ("source", "reason"), [("{{ x }}", "surrogates"), ("{{ raise_exception(x) }}", r"messages: \\ud800\.")]
    )
    def test_surrogates_do_not_break_the_pipe(self, source: str, reason: str) -> None:
        with pytest.raises(InvalidParameterError, match=reason):
            self.isolated(source)

    @pytest.mark.parametrize(
        ("source", "reason"),
        [
            ("{{ 9 ** (9 ** 9) }}", "more than 2 seconds or"),
            ("{{ 'x'.ljust(10 ** 10) }}", "or 1024 MiB"),
            ("{{ ('x' * 10 ** 10)[0] }}", "or 1024 MiB"),
        ],
    )
    def test_what_would_hang_or_fill_this_process_is_refused(
        self, source: str, reason: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "engine.text.template_sandbox.MAX_SECONDS", 100.0
        )  # its own bounds end it, not this process
        with pytest.raises(InvalidParameterError, match=reason):
            self.isolated(source)

    def test_a_process_that_does_nothing_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("engine.text.template_sandbox.MAX_SECONDS", 0.01)
        with pytest.raises(InvalidParameterError, match="seconds"):
            self.isolated("x")
