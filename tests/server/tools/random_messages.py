"""Random texts as models might write them: content, thoughts and calls in a format, whole, damaged and cut off."""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from server.tools.formats import CallFormat
from server.tools.spelling import HOLE
from server.tools.thinking import ThinkingMarks

SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {"properties": {"a": {"type": "string"}, "b": {"type": ["integer", "null", "boolean"]}}},
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "array"}}},
    "a-b.c": {},
}
MARKERS = "žμ中𝄞"
"""Letters that are in no mark, name or keyword: what becomes of them tells what becomes of a text."""
_FRAGMENTS = [
    *(
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ",",
        ";",
        ":",
        "=",
        '"',
        "'",
        "\\",
        "\n",
        " ",
        "  ",
        "<",
        ">",
        "|",
        "0",
        "1",
        "true",
    ),
    *("f", "g", "a", "None", '{"name": "f"', '"arguments": ', '{"a": "', '\\"', "é", "</", "<|", "[/", "functions.f"),
]


def random_message(rng: Random, form: CallFormat, thinking: ThinkingMarks) -> str:
    """Returns a text of some pieces, most of them well formed, sometimes with a damage somewhere or without its end."""
    pieces = [rng.choice(_PIECES)(rng, form, thinking) for _ in range(rng.randint(0, 6))]
    if rng.random() < 0.4:
        pieces.insert(0, _thought(rng, form, thinking))
    text = "".join(pieces)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        text = _damaged(rng, text, form, thinking)
    return text[: rng.randint(0, len(text))] if rng.random() < 0.2 else text


def random_cuts(rng: Random, text: str) -> Sequence[str]:
    places = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 9)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


def _words(rng: Random, form: CallFormat, thinking: ThinkingMarks) -> str:
    return "".join(rng.choices([*MARKERS, " ", "\n", "so", "."], k=rng.randint(0, 8)))


def _soup(rng: Random, form: CallFormat, thinking: ThinkingMarks) -> str:
    marks = [mark.replace(HOLE, "0") for mark in (*form.marks, thinking.opening, thinking.closing)]
    return "".join(rng.choices([*_FRAGMENTS, *marks, *MARKERS], k=rng.randint(0, 10)))


def _thought(rng: Random, form: CallFormat, thinking: ThinkingMarks) -> str:
    return f"{thinking.opening}{_words(rng, form, thinking)}{thinking.closing}{rng.choice(('', chr(10), '  '))}"


def _calls(rng: Random, form: CallFormat, thinking: ThinkingMarks) -> str:
    calls = [(rng.choice([*SCHEMAS, "other"]), _arguments(rng)) for _ in range(rng.choice((1, 1, 2, 3)))]
    return form.spelling.of(calls[:1] if form.spelling.is_single else calls)


def _arguments(rng: Random) -> str:
    names = ("a", "b", "city", "days", "k")
    return json.dumps({rng.choice(names): _value(rng, 2) for _ in range(rng.randint(0, 3))}, ensure_ascii=False)


def _value(rng: Random, depth: int) -> Any:
    text = "".join(rng.choices([*_FRAGMENTS, *MARKERS], k=rng.randint(0, 5)))
    simple = (text, rng.randint(-(2**70), 2**70), rng.choice((None, True, 0.5, "")), rng.choice(MARKERS))
    if depth and rng.random() < 0.3:
        return rng.choice(([_value(rng, depth - 1)], {"k": _value(rng, depth - 1)}))
    return rng.choice(simple)


_PIECES = (_words, _soup, _thought, _calls, _calls)


def _damaged(rng: Random, text: str, form: CallFormat, thinking: ThinkingMarks) -> str:
    """Returns the text with something inserted, left out, or repeated."""
    begin = rng.randint(0, len(text))
    end = min(len(text), begin + rng.randint(0, 6))
    middle = rng.choice(("", text[begin:end] * 2, _soup(rng, form, thinking)))
    return text[:begin] + middle + text[end:]
