"""Chat templates: what reaches them, what they may refuse, and whether requests' own are trusted."""

import asyncio
from typing import Any

import pytest

from server.protocol.chat import ConversationParams
from server.templates.render import MAX_ISOLATED, ChatRenderer
from tests.server.byte_tokenizer import BOS, ByteTokenizer
from tests.server.events import error_of
from tests.server.live_server import FakeBackend, LiveServer, live_server


class TestTemplates:
    def test_its_refusal_reaches_the_client(self) -> None:
        with live_server(FakeBackend(chat_templates={"default": "{{ raise_exception('Not so.') }}"})) as server:
            error = error_of(server.chat("Hi"))
        assert error["param"] == "messages" and error["message"].endswith("Not so.")

    def test_without_one_the_error_says_what_to_do(self) -> None:
        with live_server(FakeBackend(chat_templates={})) as server:
            error = error_of(server.chat("Hi"))
            assert error["param"] == "messages" and "--chat-template" in error["message"]
            assert server.complete("Hi").status_code == 200

    def test_a_broken_one_is_refused_when_it_is_needed(self) -> None:
        with live_server(FakeBackend(chat_templates={"default": "{% if %}"})) as server:
            assert error_of(server.chat("Hi"))["param"] == "chat_template"

    def test_kwargs_reach_it(self) -> None:
        with live_server(FakeBackend(chat_templates={"default": "{{ style }}{{ documents[0].title }}"})) as server:
            parameters: dict[str, Any] = {"chat_template_kwargs": {"style": "x"}, "documents": [{"title": "y"}]}
            server.chat("Hi", max_tokens=1, **parameters)
            assert server.engine.requests[0].prompt_token_ids == list(b"xy")

    @pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt"])
    def test_kwargs_cannot_stand_in_for_fields(self, server: LiveServer, name: str) -> None:
        assert error_of(server.chat("Hi", chat_template_kwargs={name: []}))["param"] == "chat_template_kwargs"

    def test_roles_reach_those_that_know_them_and_texts_those_that_take_no_parts(self) -> None:
        template = """
        {%- for m in messages %}{{ m.role }}:
        {%- if m.role == 'user' %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% else %}{{ m.content }}{% endif %}
        {%- if m.role == "developer" %}!{% endif %}{% endfor %}"""
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": role, "content": parts} for role in ("developer", "user", "assistant")]
        with live_server(FakeBackend(chat_templates={"default": template})) as server:
            server.chat(messages, max_tokens=1)
            prompt = bytes(server.engine.requests[0].prompt_token_ids).decode()
        assert prompt == "developer:a\nb!user:<a\nb>assistant:a\nb"

    def test_naming_developers_in_a_text_is_not_to_know_the_role(self) -> None:
        template = "You help developers.{{ messages[0].role }}"
        with live_server(FakeBackend(chat_templates={"default": template})) as server:
            server.chat([{"role": "developer", "content": "x"}], max_tokens=1)
            assert bytes(server.engine.requests[0].prompt_token_ids) == b"You help developers.system"

    def test_conversations_with_tools_take_the_one_made_for_them(self) -> None:
        class WithTools(ConversationParams):
            @property
            def template_tools(self) -> list[dict[str, Any]]:
                return [{"name": "f"}]

        body = {"messages": [{"role": "user", "content": "x"}]}
        templates = {"default": "plain", "tool_use": "{{ tools[0].name }}"}
        renderer = ChatRenderer(ByteTokenizer(templates), None, trusts_requests=False)
        rendered = [renderer.render(kind.model_validate(body)) for kind in (ConversationParams, WithTools)]
        assert rendered == ["plain", "f"]

    def test_a_requests_own_is_refused_unless_trusted(self, server: LiveServer) -> None:
        error = error_of(server.chat("Hi", chat_template="x"))
        assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]
        with live_server(trust_request_chat_template=True) as trusting:
            trusting.chat("Hi", chat_template="{{ messages[0].content }}!{{ bos_token }}", max_tokens=1)
            assert trusting.engine.requests[0].prompt_token_ids == [*b"Hi!", BOS]

    def test_only_so_many_of_requests_own_render_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        running, most = 0, 0

        async def render_slowly(*_: object) -> str:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.02)
            running -= 1
            return "x"

        async def render_many() -> None:
            await asyncio.gather(*(renderer.encode(params) for _ in range(6)))

        monkeypatch.setattr("server.templates.render.render_isolated", render_slowly)
        renderer = ChatRenderer(ByteTokenizer(), None, trusts_requests=True)
        messages = [{"role": "user", "content": "x"}]
        params = ConversationParams.model_validate({"messages": messages, "chat_template": "x"})
        asyncio.run(render_many())
        assert most == MAX_ISOLATED

    @pytest.mark.slow
    def test_others_are_served_while_a_hostile_one_renders(self) -> None:
        with live_server(trust_request_chat_template=True) as server:
            hostile = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
            with server.connect() as connection:
                connection.sendall(
                    server.request_bytes(
                        "/v1/chat/completions",
                        {"messages": [{"role": "user", "content": "x"}], "chat_template": hostile},
                    )
                )
                server.wait_until(lambda: server.context.lifecycle.num_under_way == 1)
                assert server.chat("Hi", max_tokens=1).status_code == 200
                server.wait_until(lambda: server.context.lifecycle.num_under_way == 1)
                assert connection.recv(12) == b"HTTP/1.1 400"
