"""Marks around the answer behind a thought, as Granite writes them, are in no part of a message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tools.message_parts import Content, Part, Reasoning
from server.tools.model_format import DialectSettings
from server.tools.parser import ReadingParser
from server.tools.readers import Reader, read_content, read_hermes
from server.tools.response_marks import RESPONSE_MARKS, WithoutResponseMarks
from server.tools.thinking import after_thinking
from tests.fuzz import fuzz
from tests.server.events import chunks_of, deltas_of, first
from tests.server.fake_engine import saying
from tests.server.live_server import FakeBackend, live_server
from tests.server.tools.call_texts import FUNCTIONS, cuts, joined, tool_calls
from tests.server.tools.tool_chats import TURNS

pytestmark = pytest.mark.fuzz

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def read(*pieces: str, reader: Reader = read_hermes) -> list[Part]:
    parser = WithoutResponseMarks(
        ReadingParser(after_thinking(reader, False), FUNCTIONS, "call_{}".format), *RESPONSE_MARKS
    )
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish())


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<think>Hm.</think><response>Yes.</response>", [Reasoning("Hm."), Content("Yes.")]),
        ("<think>Hm.</think>\n<response>\nYes.\n\nNo. \n</response>\n", [Reasoning("Hm."), Content("Yes.\n\nNo.")]),
        ("<think>Hm.</think><response>Cut", [Reasoning("Hm."), Content("Cut")]),
        ("<think>Hm.</think><response>a </resp", [Reasoning("Hm."), Content("a </resp")]),
        ("<think>Hm.</think><response>", [Reasoning("Hm.")]),
        ("<think>Hm.</think><response></response>", [Reasoning("Hm.")]),
        ("<think>Hm.</think><respo", [Reasoning("Hm."), Content("<respo")]),
        ("<think>Hm.</think>Plain </response>", [Reasoning("Hm."), Content("Plain </response>")]),
        ("<response>As asked for</response>", [Content("<response>As asked for</response>")]),
        ("<think>Hm.</think><response>a</response> b", [Reasoning("Hm."), Content("a</response> b")]),
        (
            f"<think>Hm.</think><response>So:</response>{CALL}",
            [Reasoning("Hm."), Content("So:"), *tool_calls([("f", "{}")])],
        ),
        (f"<think>Hm.</think>{CALL}<response>", [Reasoning("Hm."), *tool_calls([("f", "{}")]), Content("<response>")]),
    ],
)
def test_they_are_taken_out_behind_a_thought(text: str, parts: list[Part]) -> None:
    assert read(text) == read(*text) == parts


pieces = st.sampled_from(["<think>", "</think>", "<response>", "</response>", "<res", "</", "a", " ", "\n", "é", CALL])


@fuzz(200)
@given(text=st.lists(pieces, max_size=12).map("".join), data=st.data())
def test_the_cutting_of_any_text_changes_nothing(text: str, data: st.DataObject) -> None:
    assert read(*text) == read(*cuts(text, data)) == read(text)


@fuzz(200)
@given(text=st.text(st.sampled_from("ab <>/\né"), max_size=12))
def test_an_answer_between_them_is_kept_to_its_spaces(text: str) -> None:
    parts = read(f"<think>Hm.</think><response>{text}</response>", reader=read_content)
    assert parts == [Reasoning("Hm."), *([Content(text.strip())] if text.strip() else [])]


TEMPLATE = "{# Write your thoughts between <think></think> and your response between <response></response> #}" + TURNS


def test_they_are_read_off_the_template() -> None:
    with live_server(FakeBackend(chat_templates={"default": TEMPLATE})) as server:
        server.engine.rule = saying("<think>Hm.</think><response>Yes.</response>")
        message = first(server.chat().json())["message"]
        deltas = deltas_of(chunks_of(server.chat(stream=True)))
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    assert not DialectSettings().dialect_of(TURNS).marks_responses
