"""Parts that describe the text a request may generate, and their translation to a Lark grammar, a string.

    to_lark(JsonSchema({"type": "object"}))                       JSON of a schema, compact
    to_lark(JSON_OBJECT)                                          any JSON object
    to_lark(Regex(r"[0-9]{3}"))                                   the whole text matches
    to_lark(choice(["yes", "no"]))                                one of these, exactly
    to_lark(Sequence((Literal("<call>"), JsonSchema(s), Literal("</call>"))))
    to_lark(Repeat(OneOf((call_a, call_b)), at_least=1))          one of several, again and again
    to_lark(Sequence((Repeat(Sequence((TextUntil("<call>"), JsonSchema(s), Literal("</call>")))), ANY_TEXT)))

The parts nest freely; the last example is free text with tool calls in it. A client's own grammar is
`to_lark(Lark(text))`. The string belongs in `SamplingParams.grammar`. `GrammarChecker` finds out whether it compiles.

A literal also matches an added token of the same text (`<tool_call>`) unless that token is special: special tokens have
no text. The dialect is llguidance's: https://github.com/guidance-ai/llguidance, docs/syntax.md.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import llguidance

from engine.core.errors import GrammarError
from engine.grammar.closed_schema import closed
from engine.grammar.exact_json import json_rules
from engine.grammar.json_schema import check_schema
from engine.grammar.json_string import in_json_string
from engine.grammar.schema_keywords import compilable, without_nulls
from engine.grammar.schema_tree import flattened

MAX_GRAMMAR_BYTES = 128 * 1024


@dataclass(frozen=True, slots=True)
class Literal:
    """Matches exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """Matches JSON that satisfies the schema, with properties in the schema's order."""

    schema: Mapping[str, Any]
    is_open: bool = False
    """Whether objects that do not say whether they may have other properties than those named may have some."""


@dataclass(frozen=True, slots=True)
class Regex:
    """Matches text that the pattern matches as a whole: Rust's regex syntax without look-around, digits only from 0 to
    9."""

    pattern: str


@dataclass(frozen=True, slots=True)
class TextUntil:
    """Matches any text up to and including the first occurrence of `end`."""

    end: str


@dataclass(frozen=True, slots=True)
class TextWithout:
    """Matches text that matches the pattern and does not contain `absent`, and the literal `end` behind it."""

    pattern: str
    absent: str
    end: str = ""
    """Must contain `absent`, or be empty if something that is no text follows."""


@dataclass(frozen=True, slots=True)
class Token:
    """Matches this special token, which has no text. A grammar for a vocabulary without it has `text` in its place."""

    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class Rule:
    """Matches what its part matches. It is written once, however often the same object is part of others."""

    part: "Part"


@dataclass(frozen=True, slots=True)
class Sequence:
    """Matches all of the parts, one after the other."""

    parts: tuple["Part", ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """Matches any one of the parts."""

    parts: tuple["Part", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Matches the part `at_least` to `at_most` times; None for no upper bound."""

    part: "Part"
    at_least: int = 0
    at_most: int | None = None


@dataclass(frozen=True, slots=True)
class JsonString:
    """Matches a JSON string of a text that a client's grammar matches."""

    source: "Lark"


Part = Literal | JsonSchema | JsonString | Regex | TextUntil | TextWithout | Token | Rule | Sequence | OneOf | Repeat

JSON_OBJECT = JsonSchema({"type": "object"})
ANY_TEXT = Regex("(?s:.*)")


@dataclass(frozen=True, slots=True)
class Lark:
    """A whole grammar in Lark, as a client sent it; it cannot be a part of others."""

    text: str


def choice(options: Iterable[str]) -> Regex:
    """Returns a regex that matches exactly one of the options. There may be thousands; a rule has at most 2,000
    parts."""
    return Regex("|".join(map(escaped, options)))


def escaped(text: str) -> str:
    """Returns a regular expression of exactly this text."""
    return _SPECIAL.sub(lambda match: f"\\x{{{ord(match[0]):x}}}", text)


def to_lark(part: Part | Lark, tokens_as_text: bool = False) -> str:
    """Returns the grammar, equal for equal parts, for the model's vocabulary, or with special tokens as text for any.
    Raises GrammarError for errors that show without compiling it."""
    if isinstance(part, Lark):
        return _checked(part.text)
    rules = _Rules(tokens_as_text)
    start = rules.expression(part)
    return _bounded("\n".join((f"start: {start}", *rules.lines)))


def _checked(text: str) -> str:
    """Returns the client's grammar. Raises GrammarError if it has directives that would get around this file's
    checks."""
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
# that does not end is matched, too: searching for the next one from its middle on would take quadratic time.
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*+("?)|(?://|#)[^\n]*|/(?:[^/\\]|\\.)*+(/?)|<[^<>\s]++>')
_DIRECTIVE = re.compile(r"%(?:json|llguidance|lark)\b")


class _Rules:
    """Translates parts to expressions; rules for parts that need one of their own are collected in `lines`."""

    def __init__(self, tokens_as_text: bool) -> None:
        self._tokens_as_text = tokens_as_text
        self._shared: dict[int, str] = {}
        self.lines: list[str] = []

    def expression(self, part: Part) -> str:
        match part:
            case Literal(text):
                return _quote(text)
            case JsonSchema():
                return self._json(part)
            case JsonString(source):
                return f'"\\"" %lark {{\n{in_json_string(_checked(source.text))}\n}} "\\""'
            case Regex(pattern):
                return f"/{llguidance.regex_to_lark(_encodable(pattern), 'd')}/"
            case TextUntil(end):
                return self._rule(f"/(?s:.*)/ {_quote(end)}", "[lazy]")
            case TextWithout():
                return self._text_without(part)
            case Token(token_id, text):
                return _quote(text) if self._tokens_as_text else f"<[{token_id}]>"
            case _:
                return self._of_parts(part)

    def _of_parts(self, part: "Rule | Sequence | OneOf | Repeat") -> str:
        match part:
            case Rule(shared):
                if id(shared) not in self._shared:
                    self._shared[id(shared)] = self._rule(self.expression(shared))
                return self._shared[id(shared)]
            case Sequence(parts):
                return " ".join(self.expression(each) for each in parts) or '""'
            case OneOf(parts):
                return f"({' | '.join(self.expression(each) for each in parts)})"
            case Repeat(repeated, at_least, at_most):
                return f"{self._rule(self.expression(repeated))}{{{at_least},{'' if at_most is None else at_most}}}"

    def _text_without(self, part: TextWithout) -> str:
        name = f"TEXT_{len(self.lines)}"
        absent = llguidance.regex_to_lark(escaped(_encodable(part.absent)), "d")
        pattern = llguidance.regex_to_lark(_encodable(part.pattern), "d")
        self.lines.append(f"{name}: /{pattern}/ & ~/(?s:.*){absent}(?s:.*)/")
        return self._rule(f"{name} {_quote(part.end)}", "[lazy]") if part.end else name

    def _json(self, part: JsonSchema) -> str:
        schema = without_nulls(part.schema)
        check_schema(schema)
        flat = flattened(schema).changed(compilable)
        expression, lines = json_rules(flat if part.is_open else closed(flat), f"json_{len(self.lines)}")
        self.lines += lines
        return expression

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


def _bounded(grammar: str) -> str:
    num_bytes = len(grammar.encode(errors="surrogatepass"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"it takes {num_bytes} bytes as a grammar; {MAX_GRAMMAR_BYTES} are allowed")
    return grammar
