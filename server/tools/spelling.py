"""How calls are written: the texts around names and arguments, and the notation of the arguments."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from server.tools.json_text import json_text

HOLE = "\0"
"""Stands in a text for a number or an id that the model makes up. Chat templates cannot write this character."""
MARK = re.compile(r"<[^<>\s]*>|\[[A-Z_/]+\]")


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """Arguments are a JSON object."""

    def write(self, arguments: str) -> str:
        return arguments


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """Each argument stands between marks, a string as it is: `<parameter=city>Oslo</parameter>`."""

    before_key: str
    after_key: str
    """Between a key and its value. A line break at its end belongs to the mark, not to the value."""
    after_value: str
    between: str = ""
    after_key_of_other: str | None = None
    """The text in place of `after_key` for values that are no strings, if the model tells them apart."""
    has_python_constants: bool = False
    """Whether the model writes True, False and None for true, false and null."""

    def write(self, arguments: str) -> str:
        return self.between.join(self._argument(key, value) for key, value in json.loads(arguments).items())

    def _argument(self, key: str, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.before_key}{key}{self.after_key}{value}{self.after_value}"
        after_key = self.after_key if self.after_key_of_other is None else self.after_key_of_other
        return f"{self.before_key}{key}{after_key}{json_text(value)}{self.after_value}"


@dataclass(frozen=True, slots=True)
class LiteralArguments:
    """Arguments are literals of a programming language, with bare keys: `(city="Oslo")` or `{city:<|"|>Oslo<|"|>}`."""

    opening: str
    assign: str
    closing: str
    quote: str
    """What stands before and after a string. Strings have escapes as in JSON unless this is a mark of its own."""

    @property
    def has_escapes(self) -> bool:
        return len(self.quote) == 1

    def write(self, arguments: str) -> str:
        pairs = (f"{key}{self.assign}{self._literal(value)}" for key, value in json.loads(arguments).items())
        return self.opening + ("," if not self.has_escapes else ", ").join(pairs) + self.closing

    def _literal(self, value: Any) -> str:
        if self.has_escapes:
            return repr(value)
        match value:
            case str():
                return f"{self.quote}{value}{self.quote}"
            case list():
                return f"[{','.join(map(self._literal, value))}]"
            case dict():
                return "{" + ",".join(f"{key}:{self._literal(each)}" for key, each in value.items()) + "}"
            case _:
                return json_text(value)


ArgumentNotation = JsonArguments | TaggedArguments | LiteralArguments


@dataclass(frozen=True, slots=True)
class Spelling:
    """How calls are written, in grammars and in prompts, so that the format's reader parses them."""

    before_name: str
    before_arguments: str
    after_arguments: str
    between: str
    begin: str = ""
    end: str = ""
    arguments: ArgumentNotation = JsonArguments()
    is_single: bool = False
    """Whether a message has at most one call."""

    def of(self, calls: Iterable[tuple[str, str]]) -> str:
        """Returns the text of calls, each given as a name and arguments in JSON."""
        spelled = [self._call(name, arguments, str(index)) for index, (name, arguments) in enumerate(calls)]
        return self.begin + self.between.join(spelled) + self.end

    def _call(self, name: str, arguments: str, index: str) -> str:
        before, after = self.before_name + name + self.before_arguments, self.after_arguments
        return before.replace(HOLE, index) + self.arguments.write(arguments) + after.replace(HOLE, index)

    @property
    def opening(self) -> str:
        """The mark, or word, that begins calls."""
        words = (self.begin + self.before_name).split(HOLE)[0].split()
        mark = MARK.match(words[0]) if words else None
        return mark[0] if mark else words[0] if words else ""

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts that are written around names, keys and values."""
        own = (self.begin, self.before_name, self.before_arguments, self.after_arguments, self.between, self.end)
        notation = self.arguments
        inner = (getattr(notation, name) for name in notation.__slots__)
        return tuple(text for text in (*own, *inner) if isinstance(text, str) and text)
