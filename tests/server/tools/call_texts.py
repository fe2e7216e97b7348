"""Tool calls in text, for tests: random calls, and the parts that a reader finds."""

import json
from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from server.tools.incremental_text import Schema
from server.tools.message_parts import Content, Part, Reasoning, ToolCall
from server.tools.parser import ReadingParser
from server.tools.readers import Reader

NAMES = ("f", "get_weather", "a-b.c")
FUNCTIONS: dict[str, Schema] = {name: {} for name in NAMES}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a"\\{}[]é<>\n'), max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text("k\\", max_size=3), children, max_size=3),
    max_leaves=6,
)
arguments = st.tuples(
    st.dictionaries(st.sampled_from(["a", "name", "arguments", "}"]), values, max_size=3), st.sampled_from([None, 1])
).map(lambda pair: json.dumps(pair[0], indent=pair[1]))
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)


def parse(reader: Reader, *pieces: str, functions: Mapping[str, Schema] = FUNCTIONS) -> list[Part]:
    """Returns the parts that the reader finds in the pieces, neighbours of one kind joined."""
    parser = ReadingParser(reader, functions, lambda index: f"call_{index}")
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish())


def joined(parts: Sequence[Part]) -> list[Part]:
    """Returns the parts, neighbours of one kind joined."""
    whole: list[Part] = []
    for part in parts:
        match whole[-1:], part:
            case [Content(before)], Content(text):
                whole[-1] = Content(before + text)
            case [Reasoning(before)], Reasoning(text):
                whole[-1] = Reasoning(before + text)
            case [ToolCall(index, before, call_id, name)], ToolCall(id=None, arguments=text):
                assert part.index == index and part.name is None
                whole[-1] = ToolCall(index, before + text, call_id, name)
            case _:
                whole.append(part)
    return whole


def tool_calls(calls: Sequence[tuple[str, str]]) -> list[Part]:
    return [ToolCall(index, text, f"call_{index}", name) for index, (name, text) in enumerate(calls)]


def cuts(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
