"""Detection of a model's call format, tools in plain text, and counting of thinking tokens."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tools.formats import BY_NAME, HERMES, JSON, LLAMA, MISTRAL_LIST, MISTRAL_NAMED, CallFormat, format_of
from server.tools.message_parts import Reasoning
from server.tools.parser import ReadingParser
from server.tools.prompt_fallback import calls_as_text, describe_tools
from server.tools.readers import read_content, read_hermes
from server.tools.thinking import THINK, ThinkingCounter, after_thinking, begins_thinking, marks_in
from tests.server.byte_tokenizer import ByteTokenizer
from tests.server.tools.call_texts import FUNCTIONS, calls, cuts, parse, tool_calls

SAYS_TOOLS = "{% if tools %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", JSON),
        ("{{ toolset }}", JSON),
        (SAYS_TOOLS + "'<tool_call>\\n{\"name\": '", HERMES),
        (SAYS_TOOLS + "'<tool_call>\\n<function=' + call.name", None),
        (SAYS_TOOLS + "'[TOOL_CALLS] [' + call", MISTRAL_LIST),
        (SAYS_TOOLS + "'[TOOL_CALLS]' + call.name + '[ARGS]'", MISTRAL_NAMED),
        (SAYS_TOOLS + "'<|python_tag|>' + call.name", LLAMA),
        (SAYS_TOOLS + '\'Environment: ipython\' \'{"name": function name, "parameters": dictionary', LLAMA),
        (SAYS_TOOLS + "'<\uff5ctool\u2581calls\u2581begin\uff5c>'", None),
        (SAYS_TOOLS, None),
    ],
)
def test_the_format_is_detected_from_the_template(template: str, expected: CallFormat | None) -> None:
    assert format_of(template) is expected


def test_formats_have_different_names() -> None:
    assert list(BY_NAME) == ["hermes", "llama3", "mistral", "json", "granite", "lfm2", "harmony"]


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL_LIST, MISTRAL_NAMED, JSON], ids=lambda form: form.name)
@given(calls=calls, data=st.data())
def test_what_is_spelled_is_read(form: CallFormat, calls: list[tuple[str, str]], data: st.DataObject) -> None:
    assert parse(form.read, *cuts(form.spelling.of(calls), data)) == tool_calls(calls)


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL_LIST, MISTRAL_NAMED], ids=lambda form: form.name)
def test_every_mark_of_a_spelling_is_among_the_marks(form: CallFormat) -> None:
    spelled = "".join(form.spelling.texts)
    for mark in ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"):
        assert (mark in form.marks) or mark not in spelled
    assert form.opening is None or form.opening in form.marks


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}


def test_tools_are_described_in_a_system_message_of_their_own() -> None:
    system, user = describe_tools([{"role": "user", "content": "Hi"}], TOOLS, JSON.spelling)
    assert system["role"] == "system" and json.loads(system["content"].splitlines()[-1]) == TOOLS[0]["function"]
    assert user == {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("content", ["Be kind.", [{"type": "text", "text": "Be kind."}]])
def test_tools_are_described_at_the_end_of_the_system_message(content: object) -> None:
    (system,) = describe_tools([{"role": "system", "content": content}], TOOLS, JSON.spelling)
    assert system["content"].startswith("Be kind.\n\nYou can call functions.")


@pytest.mark.parametrize("form", [HERMES, JSON], ids=lambda form: form.name)
def test_tools_and_calls_are_described_as_calls_are_parsed(form: CallFormat) -> None:
    system, _ = describe_tools([{"role": "user", "content": "Hi"}], TOOLS, form.spelling)
    assert form.spelling.of([("NAME", '{"ARGUMENT": "VALUE"}')]) in system["content"]
    (message,) = calls_as_text([{"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}], form.spelling)
    assert message == {"role": "assistant", "content": form.spelling.of([("f", '{"a": "é"}')] * 2)}


def test_calls_as_text_stand_behind_the_text_before_them() -> None:
    (message,) = calls_as_text([{"role": "assistant", "content": "So:", "tool_calls": [CALL]}], JSON.spelling)
    assert message["content"] == 'So:\n{"name": "f", "arguments": {"a": "é"}}'


def test_results_as_text_are_one_user_message() -> None:
    results = [{"role": "tool", "tool_call_id": each, "content": f"is {each}"} for each in ("1", "2")]
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    _, message = calls_as_text([call, *results, {"role": "user", "content": "So?"}], JSON.spelling)
    assert message == {"role": "user", "content": "Result of f: is 1\nResult of 2: is 2\nSo?"}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("[assistant]<think>", True),
        ("[assistant]<think>\n", True),
        ("<think>", True),
        ("[assistant]<think>\n\n</think>\n\n", False),
        ("[user]<think>[assistant]", False),
        ("[assistant]", False),
    ],
)
def test_a_prompt_that_ends_with_the_mark_begins_thinking(prompt: str, expected: bool) -> None:
    assert begins_thinking(ByteTokenizer().encode(prompt), ByteTokenizer()) is expected


def test_templates_that_name_the_marks_are_of_thinking_models() -> None:
    assert marks_in("{{ '<think>' }}") is THINK and marks_in("content.split('</think>')") is THINK
    assert marks_in("{{ thinking }}") is None


F = b'<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def num_thinking(tokens: Sequence[bytes], starts_inside: bool) -> int:
    class Tokens(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return tokens[token_id]

    counter = ThinkingCounter(Tokens(), frozenset())
    parser = ReadingParser(after_thinking(read_hermes, starts_inside), FUNCTIONS, str)
    parser.feed(b"".join(tokens).decode())
    parser.finish()
    for token_id in range(len(tokens)):
        counter.add([token_id])
    return counter.num_tokens(parser.thoughts)


@pytest.mark.parametrize(
    ("tokens", "inside", "expected"),
    [
        ([b"<think>", b"hm", b"</think>", b"Yes"], False, 3),
        ([b"\n", b"<th", b"ink>", b"h\xc3", b"\xa4</", b"think", b">Yes", b"Yes"], False, 7),
        ([b"hm", b"</think>", b"Yes"], True, 2),
        ([b"\xc3", b"\xa9", b"</think>", b"Yes"], True, 3),
        ([b"hm", b"</thin", b"</th", b"ink>", b"Yes"], True, 4),
        ([b"<think>", b"hm"], False, 2),
        ([b"Yes", b"<think>", b"hm"], False, 0),
        ([b"<th", b"at", b"<think>"], False, 0),
        ([b"<think></think>Yes", b"Yes"], False, 1),
        ([], True, 0),
        ([b"<thin"], False, 0),
        ([b"<think>", b"a", b"</think>", F, b"\n", b"<think>", b"b", b"</think>", F], False, 6),
        ([b"a", b"</think>" + F + b"<think>", b"b", b"</think>" + F + b"<think>", b"c"], True, 5),
        ([b"<think>", b"a", b"</think>", F, b"So <think>", b"b", b"</think>"], False, 3),
        ([b"<think>", b"a", b"</think>", F.replace(b"{}", b'{"a": "<think>"}'), b"b", b"</think>"], False, 3),
    ],
)
def test_thinking_is_counted_in_tokens_with_its_marks(tokens: list[bytes], inside: bool, expected: int) -> None:
    assert num_thinking(tokens, inside) == expected


pieces = st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "think>", "a", "\n", "é"])


@given(st.lists(pieces, max_size=8), st.booleans())
def test_there_are_tokens_of_thinking_where_there_is_text_of_it(tokens: list[str], inside: bool) -> None:
    parts = parse(after_thinking(read_content, inside), "".join(tokens))
    num_tokens = num_thinking([token.encode() for token in tokens], inside)
    if any(isinstance(part, Reasoning) for part in parts):
        assert num_tokens > 0
    assert num_tokens == len(tokens) or "</think>" in "".join(tokens[:num_tokens]) or num_tokens == 0


def test_text_without_a_parser_is_content() -> None:
    parser = ReadingParser(read_content, {}, str)
    assert parser.feed("") == [] and parser.finish() == []
