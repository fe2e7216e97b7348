"""Chat completions, whole and streamed: shape, limits, continuing, logprobs, usage and errors."""

from typing import Any

import pytest

from tests.server.byte_tokenizer import BOS, EOS, NUM_PROMPT_TOKENS, PROMPT
from tests.server.events import chunks_of, deltas_of, error_of
from tests.server.fake_engine import saying
from tests.server.live_server import LiveServer


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


def test_a_stream_adds_up_to_the_whole_answer(server: LiveServer) -> None:
    whole = server.chat("Hi", seed=5, n=3, max_tokens=9).json()
    chunks = chunks_of(server.chat("Hi", seed=5, n=3, max_tokens=9, stream=True))
    contents = [choice["message"]["content"] for choice in whole["choices"]]
    assert [content_of(chunks, index) for index in range(3)] == contents
    assert len(set(contents)) == 3


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

    def test_nothing_is_sent_while_text_is_held_back(self, server: LiveServer) -> None:
        server.engine.rule = saying("a€b")
        deltas = deltas_of(chunks_of(server.chat("Hi", stream=True)))
        assert deltas == [{"role": "assistant", "content": "a"}, {"content": "€"}, {"content": "b"}, {}]

    def test_the_role_does_not_wait_for_text(self, server: LiveServer) -> None:
        server.engine.rule = saying("€")
        assert deltas_of(chunks_of(server.chat("Hi", stream=True))) == [
            {"role": "assistant", "content": ""},
            {"content": "€"},
            {},
        ]

    def test_a_chunk_has_all_tokens_since_the_one_before(self, server: LiveServer) -> None:
        server.engine.rule = saying("a€")
        options = {"include_usage": True, "continuous_usage_stats": True}
        parameters = {"logprobs": True, "return_token_ids": True, "stream_options": options}
        *chunks, _ = chunks_of(server.chat("Hi", stream=True, **parameters))
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [choice["token_ids"] for choice in choices] == [[97], list("€".encode()), [EOS]]
        assert [[each["bytes"] for each in choice["logprobs"]["content"]] for choice in choices] == [
            [[97]],
            [[byte] for byte in "€".encode()],
            [list(b"</s>")],
        ]
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 4, 5]

    def test_tokens_of_a_text_that_never_comes_are_in_the_last_chunk(self, server: LiveServer) -> None:
        server.engine.rule = saying("ab<")
        parameters = {"stop": ["b<>"], "return_token_ids": True}
        chunks = chunks_of(server.chat("Hi", stream=True, **parameters))
        assert deltas_of(chunks) == [{"role": "assistant", "content": "a"}, {"content": "b<"}, {}]
        server.engine.rule = saying("ab<>")
        chunks = chunks_of(server.chat("Hi", stream=True, **parameters))
        assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[97], list(b"b<>")]
        assert deltas_of(chunks) == [{"role": "assistant", "content": "a"}, {}] and "timings" in chunks[-1]

    def test_each_choice_has_its_own_beginning_and_end(self, server: LiveServer) -> None:
        server.engine.delay_s = 0.001
        chunks = chunks_of(server.chat("Hi", n=2, max_tokens=3, stream=True))
        for index in (0, 1):
            first, *rest, last = deltas_of(chunks, index)
            assert first["role"] == "assistant" and last == {} and len(rest) == 2
            assert not any("role" in delta for delta in rest)


class TestMaxTokens:
    def test_the_context_is_filled_unless_asked_otherwise(self, server: LiveServer) -> None:
        server.chat("Hi")
        assert server.engine.requests[0].params.max_tokens == 512 - NUM_PROMPT_TOKENS

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

    @pytest.mark.parametrize("name", ["prefix", "partial"])
    def test_what_asks_other_servers_to_continue_is_not_ignored(self, server: LiveServer, name: str) -> None:
        question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am "}
        messages = [question, {**answer, name: True}]
        assert error_of(server.chat(messages))["param"] == f"messages.1.{name}"
        assert server.chat(messages, continue_final_message=True, max_tokens=1).status_code == 200
        assert server.chat([*messages, question], max_tokens=1).status_code == 200
        assert server.chat([question, {**answer, name: False}], max_tokens=1).status_code == 200

    def test_the_turn_need_not_be_opened(self, server: LiveServer) -> None:
        server.chat("Hi", add_generation_prompt=False, max_tokens=1)
        assert bytes(server.engine.requests[0].prompt_token_ids[1:]) == b"[user]Hi"


class TestLogprobs:
    def test_one_entry_per_token_with_its_bytes(self, server: LiveServer) -> None:
        server.engine.rule = saying("é")
        choice = server.chat("Hi", logprobs=True, top_logprobs=1).json()["choices"][0]
        assert choice["logprobs"].keys() == {"content", "refusal"} and choice["logprobs"]["refusal"] is None
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
    def test_the_prompts_logprobs_are_sent_once(self, server: LiveServer, stream: bool, max_tokens: int) -> None:
        parameters: dict[str, Any] = {"prompt_logprobs": 1, "return_token_ids": True, "n": 2}
        response = server.chat("Hi", max_tokens=max_tokens, stream=stream, **parameters)
        bodies = chunks_of(response) if stream else [response.json()]
        (scores,) = [body["prompt_logprobs"] for body in bodies if "prompt_logprobs" in body]
        (ids,) = [body["prompt_token_ids"] for body in bodies if "prompt_token_ids" in body]
        assert ids == [BOS, *PROMPT.encode()] and len(scores) == len(ids) and scores[0] is None
        assert "prompt_token_ids" in bodies[0]


def test_errors_in_a_stream_are_events(server: LiveServer) -> None:
    server.engine.fail_at = 2
    chunks = chunks_of(server.chat("Hi", stream=True))
    assert len(chunks) == 3 and chunks[-1]["error"]["code"] == "internal_error"


def test_usage_is_sent_last_and_only_if_asked(server: LiveServer) -> None:
    server.engine.num_cached_tokens = 2
    *chunks, last = chunks_of(server.chat("Hi", max_tokens=3, stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == [] and last["usage"] == server.chat("Hi", max_tokens=3).json()["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({"continuous_usage_stats": True}, [1, 2, 2]),
        ({"continuous_usage_stats": True, "include_usage": True}, [1, 2, 2, 2]),
        ({"continuous_usage_stats": True, "include_usage": None}, [1, 2, 2]),
        ({"continuous_usage_stats": True, "include_usage": False}, []),
        ({"include_usage": False}, []),
    ],
)
def test_usage_so_far_is_not_sent_to_those_who_want_none(
    server: LiveServer, options: dict[str, Any], sent: list[int]
) -> None:
    chunks = chunks_of(server.chat("Hi", max_tokens=2, stream=True, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk] == sent


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
