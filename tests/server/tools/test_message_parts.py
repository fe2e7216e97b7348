"""Parts of messages, from a parser of the test's own: as deltas, and added up."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from engine.core.batch import TokenLogprobs
from engine.core.outputs import RequestOutput
from engine.core.request import FinishReason
from server.chat.answer import AnswerFormat
from server.chat.choice import ChatChoice
from server.chat.logprobs import ChatLogprobsFormatter
from server.chat.message import delta_of, message_of
from server.chat.output_reader import OutputReader
from server.protocol.chat import ChatRequest
from server.tools.message_parts import Content, MessageParser, Part, PlainParser, Reasoning, ToolCall
from server.tools.thinking import ThinkingMarks
from tests.server.byte_tokenizer import ByteTokenizer

THINK = [Reasoning("Let me "), Reasoning("see")]
CALLS = [ToolCall(0, '{"a"', "id-0", "f"), ToolCall(0, ": 1}"), ToolCall(1, "{}", "id-1", "g")]


class ScriptedParser:
    """Parses small letters as reasoning, capitals as content, and "!" as a call, which `finish` returns."""

    def __init__(self) -> None:
        self._held: list[Part] = []

    is_cut = False
    thoughts = ((0, None),)

    def feed(self, text: str) -> list[Part]:
        if "!" in text:
            self._held = [ToolCall(0, "{}", "id", "f")]
            return []
        return [Reasoning(text) if text.islower() else Content(text)] if text else []

    def finish(self) -> list[Part]:
        return self._held


class ScriptedAnswer(AnswerFormat):
    def parser(self, response_id: str, choice: int) -> MessageParser:
        return ScriptedParser()


def outputs(*texts: str, reason: FinishReason = FinishReason.STOP) -> list[RequestOutput]:
    """Returns outputs of one token each, whose texts these are; the last one is finished."""
    return [
        RequestOutput(
            text=text,
            token_ids=(number,),
            num_prompt_tokens=1,
            num_cached_tokens=0,
            num_output_tokens=number + 1,
            finish_reason=reason if number == len(texts) - 1 else None,
        )
        for number, text in enumerate(texts)
    ]


def reader() -> OutputReader:
    answer = ScriptedAnswer(ByteTokenizer(), {}, False, None, thinking=ThinkingMarks("<", ">"), begins_inside=True)
    return OutputReader(answer, "id", 0)


def choice(reader: OutputReader, **parameters: Any) -> ChatChoice:
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **parameters})
    return ChatChoice(0, request, reader, ByteTokenizer())


@pytest.mark.parametrize(
    ("parts", "delta"),
    [
        ([], {"content": ""}),
        ([Content("a"), Content("b")], {"content": "ab"}),
        (THINK, {"reasoning_content": "Let me see"}),
        ([*THINK, Content("!")], {"reasoning_content": "Let me see", "content": "!"}),
        (
            CALLS[:2],
            {
                "tool_calls": [
                    {"index": 0, "id": "id-0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
                ]
            },
        ),
    ],
)
def test_parts_of_one_token_are_one_delta(parts: Sequence[Part], delta: dict[str, Any]) -> None:
    assert delta_of(parts) == delta


def test_calls_are_put_together() -> None:
    assert message_of(CALLS) == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {"id": "id-0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "id-1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


@pytest.mark.parametrize(("parts", "content"), [([], ""), (THINK, ""), ([Content("a"), *CALLS], "a"), (CALLS, None)])
def test_content_is_null_only_beside_calls(parts: Sequence[Part], content: str | None) -> None:
    assert message_of(parts)["content"] == content


def test_deltas_add_up_to_the_message() -> None:
    texts = ("think", "ing", "ANSWER", "!")
    message = choice(reader()).whole(outputs(*texts))["message"]
    streamed = choice(reader())
    deltas = [each["delta"] for output in outputs(*texts) for each in streamed.chunks(output)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"] == "thinking"
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"] == "ANSWER"
    assert deltas[0] == {"role": "assistant", "reasoning_content": "think"} and deltas[-1] == {}
    assert deltas[-2]["tool_calls"][0]["function"] == message["tool_calls"][0]["function"]


def test_reasoning_tokens_are_counted_streamed_or_not() -> None:
    of_whole, of_stream = reader(), reader()
    choice(of_whole).whole(outputs("think", "ing"))
    streamed = choice(of_stream)
    for output in outputs("think", "ing"):
        streamed.chunks(output)
    assert of_whole.num_reasoning_tokens == of_stream.num_reasoning_tokens == 2


@pytest.mark.parametrize(
    ("texts", "reason", "expected"),
    [
        (("A", "!"), FinishReason.STOP, "tool_calls"),
        (("A", "!"), FinishReason.LENGTH, "length"),
        (("A", "B"), FinishReason.STOP, "stop"),
    ],
)
def test_a_call_is_the_reason_of_a_stop(texts: tuple[str, ...], reason: FinishReason, expected: str) -> None:
    streamed = choice(reader())
    last = [each for output in outputs(*texts, reason=reason) for each in streamed.chunks(output)][-1]
    assert last["finish_reason"] == choice(reader()).whole(outputs(*texts, reason=reason))["finish_reason"] == expected


def test_text_held_back_is_sent_when_the_end_brings_no_text() -> None:
    streamed = choice(reader())
    chunks = [each for output in outputs("A", "!", "") for each in streamed.chunks(output)]
    assert [set(each["delta"]) for each in chunks] == [{"role", "content"}, {"tool_calls"}, set()]


def test_where_nothing_is_called_or_thought_all_text_is_content() -> None:
    answer = AnswerFormat(ByteTokenizer(), {}, False, None, thinking=None, begins_inside=False)
    parser = answer.parser("id", 0)
    assert isinstance(parser, PlainParser)  # the usual case, and the cheapest
    assert [parser.feed("<think>"), parser.feed(""), parser.finish()] == [[Content("<think>")], [], []]


def test_only_as_many_alternatives_are_returned_as_asked_for() -> None:
    """The engine may return more alternatives than the formatter is asked for."""
    score = TokenLogprobs(65, math.nan, 1, (65, 66), (-math.inf, -2.0))
    (entry,) = ChatLogprobsFormatter(ByteTokenizer(), 1, names_as_ids=False).format([score])["content"]
    assert entry["logprob"] == -9999.0
    assert entry["top_logprobs"] == [{"token": "A", "logprob": -9999.0, "bytes": [65]}]
