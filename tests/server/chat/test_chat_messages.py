"""Messages of a chat: how they are rendered into the prompt, and what is refused by its place."""

from typing import Any

import pytest

from tests.server.events import error_of
from tests.server.live_server import LiveServer


class TestMessages:
    def prompt_of(self, server: LiveServer, messages: list[dict[str, Any]]) -> str:
        response = server.chat(messages, max_tokens=1)
        assert response.status_code == 200, response.text
        return bytes(server.engine.requests[-1].prompt_token_ids[1:]).decode()

    def test_text_parts_are_lines(self, server: LiveServer) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert self.prompt_of(server, [{"role": "user", "content": parts}]) == "[user]a\nb[assistant]"

    def test_a_developer_is_the_system_to_models_that_do_not_know_the_role(self, server: LiveServer) -> None:
        assert self.prompt_of(server, [{"role": "developer", "content": "x"}]) == "[system]x[assistant]"

    def test_templates_get_calls_with_parsed_arguments(self, server: LiveServer) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
        messages = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "4", "tool_call_id": "1"},
        ]
        assert self.prompt_of(server, messages) == "[assistant]<f x=[1, 'é']>[tool]4[assistant]"

    def test_a_tool_may_return_nothing(self, server: LiveServer) -> None:
        for content in ({"content": []}, {"content": ""}, {"content": None}, {}):
            assert self.prompt_of(server, [{"role": "tool", "tool_call_id": "1", **content}]) == "[tool][assistant]"

    def test_a_call_without_arguments_has_none(self, server: LiveServer) -> None:
        for arguments in ({"arguments": ""}, {"arguments": None}, {}):
            call = {"id": "1", "type": "function", "function": {"name": "f", **arguments}}
            assert self.prompt_of(server, [{"role": "assistant", "tool_calls": [call]}]) == "[assistant]<f>[assistant]"

    def test_a_refusal_is_the_assistants_text(self, server: LiveServer) -> None:
        assert self.prompt_of(server, [{"role": "assistant", "refusal": "No."}]) == "[assistant]No.[assistant]"
        parts = [{"type": "refusal", "refusal": "No!"}]
        assert self.prompt_of(server, [{"role": "assistant", "content": parts}]) == "[assistant]No![assistant]"

    @pytest.mark.parametrize(
        ("param", "message"),
        [
            ("messages.0", 3),
            ("messages.0.role", {}),
            ("messages.0.role", {"role": "function", "content": "x"}),
            ("messages.0.role", {"role": ["user"], "content": "x"}),
            ("messages.0.content", {"role": "user"}),
            ("messages.0.content", {"role": "user", "content": 3}),
            ("messages.0.content", {"role": "user", "content": "\ud800"}),
            ("messages.0.content", {"role": "user", "content": []}),
            (
                "messages.0.content.1",
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
            ),
            ("messages.0.content.0", {"role": "user", "content": ["a"]}),
            ("messages.0.content.0.text", {"role": "user", "content": [{"type": "text"}]}),
            ("messages.0", {"role": "assistant"}),
            ("messages.0", {"role": "assistant", "content": "x", "function_call": {}}),
            ("messages.0", {"role": "assistant", "content": "x", "audio": {"id": "1"}}),
            ("messages.0", {"role": "assistant", "content": []}),
            ("messages.0", {"role": "tool", "tool_call_id": "1", "output": "x"}),
            ("messages.0.tool_call_id", {"role": "tool", "content": "x"}),
            ("messages.0.tool_calls.0.type", {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}),
            ("messages.0.name", {"role": "user", "content": "x", "name": 3}),
        ],
    )
    def test_what_is_wrong_is_named_by_its_place(self, server: LiveServer, param: str, message: Any) -> None:
        assert error_of(server.chat([message]))["param"] == param

    @pytest.mark.parametrize("arguments", ["{", "[1]", "3", "[" * 50_000])
    def test_arguments_that_are_no_object_are_empty_for_templates_that_want_objects(
        self, server: LiveServer, arguments: str
    ) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        assert self.prompt_of(server, [{"role": "assistant", "tool_calls": [call]}]) == "[assistant]<f>[assistant]"

    @pytest.mark.parametrize("messages", [[], None, {}, [{"role": "user", "content": "x"}] * (2**14 + 1)])
    def test_there_must_be_messages_and_not_too_many(self, server: LiveServer, messages: Any) -> None:
        assert error_of(server.post_json("/v1/chat/completions", {"messages": messages}))["param"] == "messages"
