"""What a chat completion says, whole and streamed."""

import asyncio
from typing import Any

import pytest

from server.chat.render import MAX_ISOLATED, ChatRenderer
from server.protocol.chat import ConversationParams
from tests.server.byte_tokenizer import BOS, EOS, ByteTokenizer
from tests.server.events import chunks_of, deltas_of, error_of
from tests.server.fake_engine import INFO, saying
from tests.server.live_server import FakeBackend, LiveServer, live_server

PROMPT = "[user]Hi[assistant]"
NUM_PROMPT_TOKENS = 1 + len(PROMPT)


def content_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(delta.get("content", "") for delta in deltas_of(chunks, index))


def test_an_answer_is_a_message_of_the_assistant(server: LiveServer) -> None:
    server.engine.rule = saying("Hello")
    body = server.chat("Hi").json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-req-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": NUM_PROMPT_TOKENS,
        "completion_tokens": 6,
        "total_tokens": NUM_PROMPT_TOKENS + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_the_engine_is_given_the_rendered_prompt_and_nothing_added(server: LiveServer) -> None:
    server.chat("Hi", max_tokens=1)
    assert server.engine.requests[0].prompt_token_ids == [BOS, *PROMPT.encode()]


def test_a_stream_says_what_the_whole_answer_says(server: LiveServer) -> None:
    whole = server.chat("Hi", seed=5, n=3, max_tokens=9).json()
    chunks = chunks_of(server.chat("Hi", seed=5, n=3, max_tokens=9, stream=True))
    said = [choice["message"]["content"] for choice in whole["choices"]]
    assert [content_of(chunks, index) for index in range(3)] == said
    assert len(set(said)) == 3


class TestShape:
    def test_role_first_then_text_then_an_empty_end(self, server: LiveServer) -> None:
        server.engine.rule = saying("abc")
        chunks = chunks_of(server.chat("Hi", stream=True))
        assert deltas_of(chunks) == [{"role": "assistant", "content": "a"}, {"content": "b"}, {"content": "c"}, {}]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
        assert ["timings" in chunk for chunk in chunks] == [False, False, False, True]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}

    def test_the_last_token_has_a_delta_of_its_own(self, server: LiveServer) -> None:
        server.engine.rule = saying("abc")
        chunks = chunks_of(server.chat("Hi", stream=True, max_tokens=2, logprobs=True, return_token_ids=True))
        assert deltas_of(chunks) == [{"role": "assistant", "content": "a"}, {"content": "b"}, {}]
        assert chunks[-1]["choices"][0] == {
            "index": 0,
            "delta": {},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
        assert chunks[-2]["choices"][0]["token_ids"] == [ord("b")] and "timings" not in chunks[-2]

    def test_an_answer_of_nothing_still_has_a_role(self, server: LiveServer) -> None:
        server.engine.rule = saying("")
        assert deltas_of(chunks_of(server.chat("Hi", stream=True))) == [{"role": "assistant", "content": ""}, {}]
        assert server.chat("Hi").json()["choices"][0]["message"]["content"] == ""

    def test_text_held_back_is_a_delta_of_nothing(self, server: LiveServer) -> None:
        server.engine.rule = saying("€b")
        deltas = deltas_of(chunks_of(server.chat("Hi", stream=True)))
        assert [delta.get("content") for delta in deltas] == ["", "", "€", "b", None]

    def test_each_choice_has_its_own_beginning_and_end(self, server: LiveServer) -> None:
        server.engine.delay_s = 0.001
        chunks = chunks_of(server.chat("Hi", n=2, max_tokens=3, stream=True))
        for index in (0, 1):
            first, *rest, last = deltas_of(chunks, index)
            assert first["role"] == "assistant" and last == {} and len(rest) == 2
            assert not any("role" in delta for delta in rest)


class TestMaxTokens:
    def test_the_context_is_filled_unless_told_otherwise(self, server: LiveServer) -> None:
        server.chat("Hi")
        assert server.engine.requests[0].params.max_tokens == 512 - NUM_PROMPT_TOKENS

    def test_what_the_kv_cache_holds_bounds_it_too(self, server: LiveServer) -> None:
        server.engine.info = type(INFO)(
            **{name: getattr(INFO, name) for name in INFO.__struct_fields__} | {"num_blocks": 4}
        )
        server.chat("Hi")
        assert server.engine.requests[0].params.max_tokens == 64 - NUM_PROMPT_TOKENS

    @pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
    def test_either_name_limits(self, server: LiveServer, name: str) -> None:
        body = server.chat("Hi", **{name: 3}).json()
        assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (3, "length")

    def test_both_names_may_not_differ(self, server: LiveServer) -> None:
        assert server.chat("Hi", max_tokens=3, max_completion_tokens=3).status_code == 200
        assert error_of(server.chat("Hi", max_tokens=4, max_completion_tokens=3))["param"] == "max_tokens"

    @pytest.mark.parametrize("text", ["x" * 512, "x" * (512 - NUM_PROMPT_TOKENS + 2)])
    def test_a_prompt_that_fills_the_context_is_too_long(self, server: LiveServer, text: str) -> None:
        error = error_of(server.chat(text))
        assert error["code"] == "context_length_exceeded" and "maximum context length" in error["message"]

    @pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
    def test_zero_needs_a_reason(self, server: LiveServer, name: str) -> None:
        assert error_of(server.chat("Hi", **{name: 0}))["param"] == name
        body = server.chat("Hi", prompt_logprobs=0, **{name: 0}).json()
        assert len(body["prompt_logprobs"]) == NUM_PROMPT_TOKENS and body["choices"][0]["message"]["content"] == ""

    def test_a_cut_prompt_leaves_room_for_the_answer(self, server: LiveServer) -> None:
        server.chat("x" * 999, truncate_prompt_tokens=-1, max_tokens=12)
        assert len(server.engine.requests[0].prompt_token_ids) == 500


class TestContinuing:
    def test_the_prompt_ends_with_the_text(self, server: LiveServer) -> None:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am "}]
        server.chat(messages, continue_final_message=True, max_tokens=1)
        assert bytes(server.engine.requests[0].prompt_token_ids[1:]) == b"[user]Hi[assistant]I am "

    @pytest.mark.parametrize(
        "fields", [{"content": "I am "}, {"content": [{"type": "text", "text": "I am "}]}, {"refusal": "I am "}]
    )
    def test_echo_begins_the_answer_with_it(self, server: LiveServer, fields: dict[str, Any]) -> None:
        server.engine.rule = saying("ok")
        messages = [{"role": "assistant", **fields}]
        parameters: dict[str, Any] = {"continue_final_message": True, "echo": True}
        assert server.chat(messages, **parameters).json()["choices"][0]["message"]["content"] == "I am ok"
        deltas = deltas_of(chunks_of(server.chat(messages, stream=True, **parameters)))
        assert deltas == [{"role": "assistant", "content": "I am o"}, {"content": "k"}, {}]

    @pytest.mark.parametrize(
        ("param", "parameters"),
        [
            ("add_generation_prompt", {"continue_final_message": True, "add_generation_prompt": True}),
            ("echo", {"echo": True}),
        ],
    )
    def test_what_contradicts_itself_is_refused(
        self, server: LiveServer, param: str, parameters: dict[str, Any]
    ) -> None:
        assert error_of(server.chat("Hi", **parameters))["param"] == param

    def test_calls_are_not_continued(self, server: LiveServer) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So ", "tool_calls": [call]}]
        assert error_of(server.chat(messages, continue_final_message=True))["param"] == "messages"
        body = {"messages": messages, "continue_final_message": True}
        assert error_of(server.post_json("/tokenize", body))["param"] == "messages"

    def test_the_turn_need_not_be_opened(self, server: LiveServer) -> None:
        server.chat("Hi", add_generation_prompt=False, max_tokens=1)
        assert bytes(server.engine.requests[0].prompt_token_ids[1:]) == b"[user]Hi"


class TestLogprobs:
    def test_one_entry_per_token_with_its_bytes(self, server: LiveServer) -> None:
        server.engine.rule = saying("é")
        choice = server.chat("Hi", logprobs=True, top_logprobs=1).json()["choices"][0]
        top = [{"token": "a", "logprob": -0.5, "bytes": [97]}]
        entries = choice["logprobs"]["content"]
        assert entries[0] == {"token": "bytes:\\xc3", "logprob": -49.5, "bytes": [0xC3], "top_logprobs": top}
        assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9], list(b"</s>")]

    def test_streamed_entries_make_the_whole(self, server: LiveServer) -> None:
        parameters: dict[str, Any] = {"seed": 3, "logprobs": True, "top_logprobs": 2, "max_tokens": 5}
        whole = server.chat("Hi", **parameters).json()["choices"][0]["logprobs"]["content"]
        chunks = chunks_of(server.chat("Hi", stream=True, **parameters))
        pieces = [chunk["choices"][0]["logprobs"] or {"content": []} for chunk in chunks]
        assert [entry for piece in pieces for entry in piece["content"]] == whole and len(whole) == 5

    def test_no_alternatives_unless_asked_for(self, server: LiveServer) -> None:
        entries = server.chat("Hi", logprobs=True, max_tokens=2).json()["choices"][0]["logprobs"]["content"]
        assert [entry["top_logprobs"] for entry in entries] == [[], []]

    @pytest.mark.parametrize("parameters", [{"top_logprobs": 1}, {"logprobs": True, "top_logprobs": 21}])
    def test_what_cannot_be_is_refused(self, server: LiveServer, parameters: dict[str, Any]) -> None:
        assert error_of(server.chat("Hi", **parameters))["param"] == "top_logprobs"

    @pytest.mark.parametrize("max_tokens", [1, 2])
    @pytest.mark.parametrize("stream", [False, True])
    def test_the_prompts_are_told_once(self, server: LiveServer, stream: bool, max_tokens: int) -> None:
        parameters: dict[str, Any] = {"prompt_logprobs": 1, "return_token_ids": True, "n": 2}
        response = server.chat("Hi", max_tokens=max_tokens, stream=stream, **parameters)
        bodies = chunks_of(response) if stream else [response.json()]
        (scores,) = [body["prompt_logprobs"] for body in bodies if "prompt_logprobs" in body]
        (ids,) = [body["prompt_token_ids"] for body in bodies if "prompt_token_ids" in body]
        assert ids == [BOS, *PROMPT.encode()] and len(scores) == len(ids) and scores[0] is None
        assert "prompt_token_ids" in bodies[0]


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

    def test_calls_are_told_with_their_arguments_read(self, server: LiveServer) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
        messages = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "4", "tool_call_id": "1"},
        ]
        assert self.prompt_of(server, messages) == "[assistant]<f x=[1, 'é']>[tool]4[assistant]"

    def test_a_call_without_arguments_has_none(self, server: LiveServer) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
        assert self.prompt_of(server, [{"role": "assistant", "tool_calls": [call]}]) == "[assistant]<f>[assistant]"

    def test_a_refusal_is_what_the_assistant_said(self, server: LiveServer) -> None:
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
            ("messages.0.tool_call_id", {"role": "tool", "content": "x"}),
            ("messages.0.tool_calls.0.type", {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}),
            ("messages.0.name", {"role": "user", "content": "x", "name": 3}),
        ],
    )
    def test_what_is_wrong_is_named_by_its_place(self, server: LiveServer, param: str, message: Any) -> None:
        assert error_of(server.chat([message]))["param"] == param

    @pytest.mark.parametrize("arguments", ["{", "[1]", "3", "[" * 50_000])
    def test_arguments_that_are_no_object_are_refused(self, server: LiveServer, arguments: str) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        error = error_of(server.chat([{"role": "assistant", "tool_calls": [call]}]))
        assert error["param"] == "messages.0.tool_calls.0.function.arguments"

    @pytest.mark.parametrize("messages", [[], None, {}, [{"role": "user", "content": "x"}] * (2**14 + 1)])
    def test_there_must_be_messages_and_not_too_many(self, server: LiveServer, messages: Any) -> None:
        assert error_of(server.post_json("/v1/chat/completions", {"messages": messages}))["param"] == "messages"


class TestTemplates:
    def test_what_it_refuses_is_told(self) -> None:
        with live_server(FakeBackend(chat_templates={"default": "{{ raise_exception('Not so.') }}"})) as server:
            error = error_of(server.chat("Hi"))
        assert error["param"] == "messages" and error["message"].endswith("Not so.")

    def test_a_model_without_one_says_what_to_do(self) -> None:
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

    def test_parts_and_roles_reach_those_that_know_them(self) -> None:
        template = """
        {%- for m in messages %}{{ m.role }}:
        {%- if m.role == 'user' %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% else %}{{ m.content }}{% endif %}
        {%- if m.role == "developer" %}!{% endif %}{% endfor %}"""
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": role, "content": parts} for role in ("developer", "user", "assistant")]
        with live_server(FakeBackend(chat_templates={"default": template})) as server:
            server.chat(messages, max_tokens=1)
            prompt = bytes(server.engine.requests[0].prompt_token_ids).decode()
        assert prompt == "developer:a\nb!user:<a><b>assistant:a\nb"

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

        monkeypatch.setattr("server.chat.render.render_isolated", render_slowly)
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


class TestRender:
    def test_it_tells_the_prompt_and_generates_nothing(self, server: LiveServer) -> None:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        assert server.post_json("/v1/chat/completions/render", body).json() == {
            "prompt": f"<s>{PROMPT}",
            "prompt_token_ids": [BOS, *PROMPT.encode()],
            "count": NUM_PROMPT_TOKENS,
            "max_tokens": 512 - NUM_PROMPT_TOKENS,
            "max_model_len": 512,
        }
        assert server.engine.requests == []

    def test_it_refuses_what_generating_would_refuse(self, server: LiveServer) -> None:
        body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": -1}
        assert error_of(server.post_json("/v1/chat/completions/render", body))["param"] == "temperature"

    def test_tokenize_counts_the_same(self, server: LiveServer) -> None:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        tokens = server.post_json("/tokenize", body | {"return_token_strs": True}).json()
        assert (tokens["count"], tokens["tokens"]) == (NUM_PROMPT_TOKENS, [BOS, *PROMPT.encode()])
        assert "".join(tokens["token_strs"]) == f"<s>{PROMPT}"
        cut = server.post_json("/tokenize", body | {"add_generation_prompt": False}).json()
        assert cut["tokens"] == [BOS, *b"[user]Hi"]

    @pytest.mark.parametrize(
        ("param", "extra"),
        [
            ("messages.0.role", {"messages": [{"role": "x"}]}),
            ("add_generation_prompt", {"continue_final_message": True, "add_generation_prompt": True}),
            ("chat_template", {"chat_template": "x"}),
            ("truncate_prompt_tokens", {"truncate_prompt_tokens": 1}),
        ],
    )
    def test_tokenize_names_what_is_wrong(self, server: LiveServer, param: str, extra: dict[str, Any]) -> None:
        body = {"messages": [{"role": "user", "content": "Hi"}], **extra}
        assert error_of(server.post_json("/tokenize", body))["param"] == param

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/tokenize", {"prompt": "Hi", "truncate_prompt_tokens": 1}),
            ("/detokenize", {"tokens": [1], "prompt": "Hi"}),
        ],
    )
    def test_nothing_is_taken_and_then_ignored(self, server: LiveServer, path: str, body: dict[str, Any]) -> None:
        refused = server.post_json(path, body)
        assert (refused.status_code, error_of(refused)["param"]) == (400, list(body)[1])


def test_errors_in_a_stream_are_events(server: LiveServer) -> None:
    server.engine.fail_at = 2
    chunks = chunks_of(server.chat("Hi", stream=True))
    assert len(chunks) == 3 and chunks[-1]["error"]["code"] == "internal_error"


def test_usage_is_told_last_and_only_if_asked(server: LiveServer) -> None:
    server.engine.num_cached_tokens = 2
    *chunks, last = chunks_of(server.chat("Hi", max_tokens=3, stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == [] and last["usage"] == server.chat("Hi", max_tokens=3).json()["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)


def test_headers_are_those_of_completions(server: LiveServer) -> None:
    headers = server.chat("Hi", max_tokens=3).headers
    assert headers["x-prompt-tokens"] == str(NUM_PROMPT_TOKENS) and headers["x-generated-tokens"] == "3"
    streamed = server.chat("Hi", max_tokens=3, stream=True).headers
    assert (streamed["x-ttft-ms"], streamed["cache-control"]) == ("3.0", "no-cache")


def test_leaving_frees_at_once(server: LiveServer) -> None:
    server.engine.hold_at = 1
    with server.connect() as connection:
        connection.sendall(
            server.request_bytes("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        )
        server.wait_until(lambda: server.engine.num_holding == 1)
    server.wait_until_idle()


def test_eos_may_be_ignored(server: LiveServer) -> None:
    server.engine.rule = lambda *_: EOS
    assert server.chat("Hi", max_tokens=4, ignore_eos=True).json()["usage"]["completion_tokens"] == 4
