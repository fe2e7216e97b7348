"""The content of messages in the prompt: all of its text, in the form that the chat template reads, or none."""

from typing import Any

import pytest

from tests.server.live_server import FakeBackend, LiveServer, live_server

# Templates write the first part of a list only, every part of a list, or a text.
FIRST_PART = """\
{%- for m in messages %}[{{ m.role }}]
{%- if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}{% endfor %}"""
ONLY_FIRST_PART = "{% for m in messages %}[{{ m.role }}]{{ m.content[0].text }}{% endfor %}"
ONLY_PARTS = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}"
TEMPLATES = [FIRST_PART, ONLY_FIRST_PART, ONLY_PARTS, PLAIN]

TEXT, OTHER = {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
BLOCKS = [TEXT, OTHER]
CALL = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "123456789", "content": "4"}


def serving(template: str) -> Any:
    return live_server(FakeBackend(chat_templates={"default": template}))


def prompt_of(server: LiveServer, messages: list[dict[str, Any]]) -> str:
    response = server.chat(messages, max_tokens=1)
    assert response.status_code == 200, response.text
    return bytes(server.engine.requests[-1].prompt_token_ids).decode()


@pytest.mark.parametrize("template", TEMPLATES)
def test_no_text_is_lost_in_any_api(template: str) -> None:
    user = {"role": "user", "content": BLOCKS}
    expected = b"[system]a\nb[user]a\nb"
    with serving(template) as server:
        assert prompt_of(server, [{"role": "system", "content": BLOCKS}, user]).encode() == expected
        server.message([user], system=BLOCKS)
        items = [{"type": "input_text", "text": part["text"]} for part in BLOCKS]
        server.respond([{"role": role, "content": items} for role in ("system", "user")], max_output_tokens=1)
        assert [bytes(each.prompt_token_ids) for each in server.engine.requests] == [expected] * 3
        counted = server.post_json("/v1/messages/count_tokens", {"messages": [user], "system": BLOCKS})
        assert counted.json()["input_tokens"] == len(expected)


@pytest.mark.parametrize("template", [ONLY_FIRST_PART, ONLY_PARTS])
def test_a_text_reaches_templates_that_read_parts(template: str) -> None:
    with serving(template) as server:
        messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
        assert prompt_of(server, messages) == "[system]x[user]y"


def test_a_result_reaches_templates_that_read_parts() -> None:
    with serving(ONLY_PARTS.replace("{% for p", CALLS + "{% for p")) as server:
        call = {"role": "assistant", "content": "so", "tool_calls": [CALL]}
        assert prompt_of(server, [{"role": "user", "content": "x"}, call, RESULT]) == "[user]x[assistant]<f>so[tool]4"


def test_what_is_told_in_text_reaches_templates_that_read_parts() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    with serving(ONLY_PARTS) as server:
        server.chat([{"role": "user", "content": BLOCKS}], tools=[tool], max_tokens=1)
        prompt = bytes(server.engine.requests[0].prompt_token_ids).decode()
    assert "You can call functions." in prompt and prompt.endswith("[user]a\nb")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{{ m.content }}", ""),
        ("{{ m.content | trim }}", ""),
        ("{% if 'x' in m.content %}x{% endif %}{{ m.content }}", ""),
        ("{% if m.content is none %}(null){% else %}{{ m.content }}{% endif %}", "(null)"),
        ("{% if m.content == '' %}{{ raise_exception('empty') }}{% endif %}{{ m.content.strip() if m.content }}", ""),
        ("{% if 'content' in m %}:{{ m.content + '' }}{% endif %}", ":"),
        ("{% if 'content' in m %}{{ m.content[0] + '' }}{% endif %}", ""),
        ("{% if m.content == '' or m.content is none %}{{ raise_exception('no') }}{% endif %}{{ m.content }}", ""),
    ],
)
def test_a_call_sent_back_without_content_has_none(content: str, expected: str) -> None:
    template = "{% for m in messages %}[{{ m.role }}]" + content + CALLS + "{% endfor %}"
    hello, call = {"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}
    without = {name: value for name, value in call.items() if name != "content"}
    with serving(template) as server:
        prompts = {prompt_of(server, [hello, each, RESULT]) for each in (call, without, {**call, "content": []})}
    (prompt,) = prompts
    assert prompt.startswith("[user]") and f"[assistant]{expected}<f>[tool]" in prompt


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("content", [{"content": None}, {}])
def test_thinking_may_stand_alone(name: str, content: dict[str, Any]) -> None:
    template = "{% for m in messages %}[{{ m.role }}]({{ m.reasoning_content }}){{ m.content }}{% endfor %}"
    with serving(template) as server:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", **content, name: "hm"}]
        assert prompt_of(server, messages) == "[user]()x[assistant](hm)"
