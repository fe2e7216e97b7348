"""Literals of programming languages -> JSON: Python's, JSON's own, and those with bare keys and marks for quotes."""

import json
import re

from server.tools.incremental_text import IncrementalText, NotACall, Reading
from server.tools.json_text import json_text

QUOTE_MARK = '<|"|>'
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"(?:[^\W\d]|\$)[\w$.-]*")
_SPACES = re.compile(r"\s*")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": ""}


def read_literal(text: IncrementalText) -> Reading[str]:
    """Reads the literal that comes next, up to a comma or bracket that is not its own, and returns its text."""
    begin, depth = text.num_held, 0
    while (yield from text.arrived()):
        if (yield from text.next_is("\"'<")):
            yield from _read_string_or_character(text)
        elif depth == 0 and (yield from text.next_is(",)}]")):
            break
        else:
            opens, closes = (yield from text.next_is("([{")), (yield from text.next_is(")]}"))
            depth += opens - closes
            text.hold(1)
    return text.held(begin)


def _read_string_or_character(text: IncrementalText) -> Reading[None]:
    if (yield from text.accept(QUOTE_MARK)):
        while (yield from text.arrived()):
            if (yield from text.accept(QUOTE_MARK)):
                return
            text.hold(1)
        return
    received, position = text.unread()
    quote = received[position]
    text.hold(1)
    while quote != "<" and (yield from text.arrived()):
        if (yield from text.accept("\\")):
            if (yield from text.arrived()):
                text.hold(1)
        else:
            is_end = yield from text.next_is(quote)
            text.hold(1)
            if is_end:
                return


def literal_json(text: str) -> str:
    """Returns the literal as JSON; its numbers as they are written. Raises NotACall if it is none."""
    try:
        json_text, end = _value(text, 0)
    except (RecursionError, IndexError):
        raise NotACall from None
    if _skip(text, end) != len(text):
        raise NotACall
    return json_text


def _value(text: str, position: int) -> tuple[str, int]:
    position = _skip(text, position)
    character = text[position]
    if character == "[" or character == "(":
        return _items(text, position + 1, "]" if character == "[" else ")")
    if character == "{":
        return _members(text, position + 1)
    if character in "\"'" or text.startswith(QUOTE_MARK, position):
        return _string(text, position)
    if number := _NUMBER.match(text, position):
        return number[0], number.end()
    word = _WORD.match(text, position)
    if word is None or word[0] not in _CONSTANTS:
        raise NotACall
    return _CONSTANTS[word[0]], word.end()


def _items(text: str, position: int, closing: str) -> tuple[str, int]:
    items: list[str] = []
    while text[position := _skip(text, position)] != closing:
        item, position = _value(text, position)
        items.append(item)
        position = _after_item(text, position, closing)
    return f"[{', '.join(items)}]", position + 1


def _members(text: str, position: int) -> tuple[str, int]:
    members: list[str] = []
    while text[position := _skip(text, position)] != "}":
        bare = _WORD.match(text, position)
        key, position = (json.dumps(bare[0]), bare.end()) if bare else _string(text, position)
        position = _skip(text, position)
        if text[position] != ":":
            raise NotACall
        value, position = _value(text, position + 1)
        members.append(f"{key}: {value}")
        position = _after_item(text, position, "}")
    return "{" + ", ".join(members) + "}", position + 1


def _after_item(text: str, position: int, closing: str) -> int:
    """Returns the position behind the comma that follows, or that of the closing bracket."""
    position = _skip(text, position)
    if text[position] == closing:
        return position
    if text[position] != ",":
        raise NotACall
    return position + 1


def _string(text: str, position: int) -> tuple[str, int]:
    if text.startswith(QUOTE_MARK, position):
        begin = position + len(QUOTE_MARK)
        end = text.find(QUOTE_MARK, begin)
        if end < 0:
            raise NotACall
        return json_text(text[begin:end]), end + len(QUOTE_MARK)
    quote, begin = text[position], position + 1
    if quote not in "\"'":
        raise NotACall
    end = begin
    while text[end] != quote:
        end += 2 if text[end] == "\\" else 1
    return _json_string(_ESCAPE.sub(_unescaped, text[begin:end])), end + 1


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPED.get(code, "\\" + code)


def _json_string(text: str) -> str:
    """Returns the text as JSON; halves of characters, which escapes may have written, are joined where they fit."""
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json_text(joined)


def _skip(text: str, position: int) -> int:
    spaces = _SPACES.match(text, position)
    assert spaces is not None
    return spaces.end()
