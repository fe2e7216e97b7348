"""What a request may demand of its text, and the one form in which the engine is told: a Lark grammar as a string.

    to_lark(JsonSchema({"type": "object"}))                       JSON of a schema, compact
    to_lark(JSON_OBJECT)                                          any JSON object
    to_lark(Regex(r"[0-9]{3}"))                                   the whole text matches
    to_lark(choice(["yes", "no"]))                                one of these, exactly
    to_lark(Sequence((Literal("<call>"), JsonSchema(s), Literal("</call>"))))
    to_lark(Repeat(OneOf((call_a, call_b)), at_least=1))          one of several, again and again
    to_lark(Sequence((Repeat(Sequence((TextUntil("<call>"), JsonSchema(s), Literal("</call>")))), ANY_TEXT)))

The parts nest freely; the last example is free text with calls in it. A client's own grammar is `to_lark(Lark(text))`.
The string belongs in `SamplingParams.grammar`. Whether it compiles is for `GrammarChecker` to say.

A literal also matches an added token of the same text (`<tool_call>`) unless that token is special: special tokens are
no text. The dialect is llguidance's: https://github.com/guidance-ai/llguidance, docs/syntax.md.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import llguidance

from engine.core.errors import GrammarError
from engine.grammar.json_schema import check_schema, compilable

MAX_GRAMMAR_BYTES = 128 * 1024

# At most one space, and only where Python's json.dumps puts one: a model cannot lose itself in whitespace.
_JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that satisfies the schema, properties in the schema's order."""

    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that matches as a whole; Rust's regex syntax without look-around, and digits are those from 0 to 9."""

    pattern: str


@dataclass(frozen=True, slots=True)
class TextUntil:
    """Any text up to and including the first occurrence of `end`."""

    end: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """All of these, one after the other."""

    parts: tuple["Part", ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """Any one of these."""

    parts: tuple["Part", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The part again and again; None for no upper bound."""

    part: "Part"
    at_least: int = 0
    at_most: int | None = None


Part = Literal | JsonSchema | Regex | TextUntil | Sequence | OneOf | Repeat

JSON_OBJECT = JsonSchema({"type": "object"})
ANY_TEXT = Regex("(?s:.*)")


@dataclass(frozen=True, slots=True)
class Lark:
    """A whole grammar that a client wrote; no part of others."""

    text: str


def choice(options: Iterable[str]) -> Regex:
    """One expression, of which there may be thousands: a rule of the compiler has at most 2,000 parts."""
    return Regex("|".join(_SPECIAL.sub(lambda match: f"\\x{{{ord(match[0]):x}}}", option) for option in options))


def to_lark(part: Part | Lark) -> str:
    """The canonical grammar, equal for equal parts. Raises GrammarError for what can be seen to be wrong."""
    if isinstance(part, Lark):
        return _checked(part.text)
    rules = _Rules()
    start = rules.expression(part)
    return _bounded("\n".join((f"start: {start}", *rules.lines)))


def _checked(text: str) -> str:
    """Directives that would get around the checks of this file are refused."""
    _bounded(text)
    if directive := _DIRECTIVE.search(_QUOTED.sub(_blank, text)):
        raise GrammarError(f"the grammar must not contain {directive[0]}")
    return text


def _blank(quoted: re.Match[str]) -> str:
    if "" in quoted.groups():
        raise GrammarError("a string or regular expression in the grammar has no end")
    return '""'


_SPECIAL = re.compile(r"[\x00-\x1f\x7f\\.+*?()|\[\]{}^$/]")  # in regular expressions
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]")  # what Lark's strings have no escapes for
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# Strings, comments, regular expressions and special tokens, as llguidance's lexer takes them. A string or expression
# that does not end is matched, too: looking for the next one in its middle would take quadratic time.
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*+("?)|(?://|#)[^\n]*|/(?:[^/\\]|\\.)*+(/?)|<[^<>\s]++>')
_DIRECTIVE = re.compile(r"%(?:json|llguidance|lark)\b")


class _Rules:
    """Parts as expressions; those that must stand in a rule of their own are collected in `lines`."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def expression(self, part: Part) -> str:
        match part:
            case Literal(text):
                return _quote(text)
            case JsonSchema(schema):
                return _json(schema)
            case Regex(pattern):
                return f"/{llguidance.regex_to_lark(_encodable(pattern), 'd')}/"
            case TextUntil(end):
                return self._rule(f"/(?s:.*)/ {_quote(end)}", "[lazy]")
            case Sequence(parts):
                return " ".join(self.expression(each) for each in parts) or '""'
            case OneOf(parts):
                return f"({' | '.join(self.expression(each) for each in parts)})"
            case Repeat(repeated, at_least, at_most):
                return f"{self._rule(self.expression(repeated))}{{{at_least},{'' if at_most is None else at_most}}}"

    def _rule(self, body: str, options: str = "") -> str:
        name = f"part_{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name


def _encodable(text: str) -> str:
    if _SURROGATE.search(text):
        raise GrammarError("a text in it has lone surrogates")
    return text


def _quote(text: str) -> str:
    if _CONTROL.search(_encodable(text)):
        return "/" + "".join(f"\\x{{{ord(character):x}}}" for character in text) + "/"
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any]) -> str:
    check_schema(schema)
    try:
        return "%json " + json.dumps({**compilable(schema), "x-guidance": _JSON_LAYOUT}, allow_nan=False)
    except ValueError as error:
        raise GrammarError("the schema has a number that JSON has not") from error


def _bounded(grammar: str) -> str:
    num_bytes = len(grammar.encode(errors="surrogatepass"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"it takes {num_bytes} bytes as a grammar; {MAX_GRAMMAR_BYTES} are allowed")
    return grammar
