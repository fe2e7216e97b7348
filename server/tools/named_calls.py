"""Calls whose name stands outside of JSON, read as they are spelled: `<function=f><parameter=a>1</parameter>...`.

Spaces may differ from the spelling wherever they only separate. Texts between calls and behind them may be absent.
"""

import json
from collections.abc import Callable, Sequence

from server.tools.argument_types import STRING, types_of_argument, value_json
from server.tools.call import read_arguments
from server.tools.incremental_text import (
    NAME_CHARACTERS,
    IncrementalText,
    NotACall,
    Reading,
    Schema,
    attempt,
    num_overlapping,
)
from server.tools.json_beginning import begins_json
from server.tools.json_text import json_text
from server.tools.literals import QUOTE_MARK, literal_json, read_literal
from server.tools.spelling import JsonArguments, LiteralArguments, Spelling, TaggedArguments

_NO_KEY = " \t\r\n,(){}[]'\"<"


def named_calls(spelling: Spelling) -> Callable[[IncrementalText], Reading[None]]:
    """Returns a reader of messages with calls of this spelling."""

    def read(text: IncrementalText) -> Reading[None]:
        while (yield from text.read_until(spelling.opening)):
            if (yield from attempt(text, read_block)):
                yield from text.skip_after_call()

    def read_block(text: IncrementalText) -> Reading[None]:
        beginning = (spelling.begin + spelling.before_name).lstrip().removeprefix(spelling.opening)
        if not (yield from text.accept_words(beginning)):
            raise NotACall
        yield from _read_call(text, spelling)
        while (yield from text.accept_words(spelling.between + spelling.before_name)):
            yield from _read_call(text, spelling)
        yield from text.accept_words(spelling.end)
        text.discard()

    return read


def _read_call(text: IncrementalText, spelling: Spelling) -> Reading[None]:
    """Reads a call from its name on. Raises NotACall if it is of no offered function, or has no arguments."""
    yield from text.read_spaces()
    begin = text.num_held
    yield from text.read_run(NAME_CHARACTERS)
    name = text.held(begin)
    if not (yield from text.accept_words(spelling.before_arguments)):
        raise NotACall
    match spelling.arguments:
        case JsonArguments():
            yield from _read_object(text, name)
        case TaggedArguments() as tagged:
            yield from _read_tagged(text, name, tagged, spelling.after_arguments)
        case LiteralArguments() as literal:
            yield from _read_literals(text, name, literal)
    yield from _accept_end(text, spelling.after_arguments)
    text.discard()


def _accept_end(text: IncrementalText, words: str) -> Reading[bool]:
    """Reads the words, or the last of them: models forget to close what is closed by the rest."""
    for tail in _tails(words):
        if (yield from text.accept_words(tail)):
            return True
    return False


def _tails(words: str) -> list[str]:
    split = words.split()
    return [" ".join(split[index:]) for index in range(len(split))]


def _read_object(text: IncrementalText, name: str) -> Reading[None]:
    yield from text.read_spaces()
    if not (yield from text.next_is("{")):
        raise NotACall
    text.start_call(name)
    yield from read_arguments(text)


def _read_tagged(text: IncrementalText, name: str, marks: TaggedArguments, after: str) -> Reading[None]:
    """Reads arguments between marks, up to `after`, and emits each as JSON: strings while they are written, other
    values as they close."""
    if not ((yield from text.may_follow(marks.before_key)) or (yield from text.may_follow(after))):
        raise NotACall
    if not (yield from text.arrived()):
        raise NotACall
    text.start_call(name)
    text.is_cut = True
    separator = "{"
    while (yield from text.accept_words(marks.before_key)):
        if not (yield from _read_argument(text, text.schema_of(name), marks, separator, after)):
            text.discard()
            return
        text.discard()
        separator = ", "
    if not ((yield from text.breaks_off(after)) or (yield from text.breaks_off(marks.before_key))):
        text.is_cut = False
        text.add_arguments("{}" if separator == "{" else "}")


def _read_argument(
    text: IncrementalText, schema: Schema, marks: TaggedArguments, separator: str, after: str
) -> Reading[bool]:
    """Reads an argument from its key on. False if the text ends within."""
    key, is_other, is_cut = yield from _read_key(text, marks)
    if is_cut:
        text.discard()
        text.add_arguments(separator + json_text(key)[:-1] if key else "")
        return False
    types = types_of_argument(schema, key)
    if marks.after_key_of_other is not None:
        types = types - STRING if is_other else STRING
    text.discard()
    text.add_arguments(f"{separator}{json_text(key)}: ")
    value = _Value(text, marks, types)
    close = marks.after_value.strip()
    if marks.after_key.endswith("\n"):
        yield from text.accept("\n")
        text.discard()
    while (yield from text.read_value(close, value.take)):
        num_before = text.num_held
        yield from text.accept(close)
        if (yield from _may_follow_any(text, [marks.between + marks.before_key, *_tails(after)])):
            value.end(num_before)
            return True
        text.unread_to(num_before + 1)
    value.cut()
    return False


def _may_follow_any(text: IncrementalText, options: Sequence[str]) -> Reading[bool]:
    for words in options:
        if (yield from text.may_follow(words)):
            return True
    return False


def _read_key(text: IncrementalText, marks: TaggedArguments) -> Reading[tuple[str, bool, bool]]:
    """Reads a key and the mark behind it. Returns the key, whether the mark is that of a value that is no string, and
    whether the text ends before that mark."""
    begin = text.num_held
    after, other = marks.after_key.rstrip(), (marks.after_key_of_other or "").rstrip()
    while (yield from text.arrived()):
        end = text.num_held
        for mark in filter(None, (after, other)):
            if (yield from text.accept_words(mark)):
                return text.held(begin)[: end - begin].strip(), mark == other, False
        text.hold(1)
    key = text.held(begin)
    num_of_mark = max(num_overlapping(key, mark) for mark in (after, other))
    return key[: len(key) - num_of_mark].strip(), False, True


class _Value:
    """The value that is being read: its text becomes JSON, at once if it can only be a string."""

    def __init__(self, text: IncrementalText, marks: TaggedArguments, types: frozenset[str]) -> None:
        self._text = text
        self._types = types
        self._ends_with_break = marks.after_value.startswith("\n")
        if types == STRING:
            text.add_arguments('"')

    def take(self) -> None:
        """Emits what is certain of the text that was read."""
        if self._types == STRING:
            self._text.add_arguments(json_text(self._text.take_held(leave=int(self._ends_with_break)))[1:-1])

    def end(self, num_chars: int) -> None:
        """Emits the rest: the first `num_chars` characters that are held."""
        held = self._text.held()[:num_chars]
        value = held.removesuffix("\n") if self._ends_with_break else held
        self._text.discard()
        self._text.add_arguments(json_text(value)[1:] if self._types == STRING else value_json(value, self._types))

    def cut(self) -> None:
        """Emits the rest of a value that has no end: as much as there is, as JSON that could go on. What may be the
        beginning of the mark behind it is discarded."""
        held = self._text.held()
        value = held.removesuffix("\n") if self._ends_with_break else held
        received, position = self._text.unread()
        self._text.hold(len(received) - position)
        self._text.discard()
        self._text.add_arguments(json_text(value)[1:-1] if self._types == STRING else _beginning(value))


def _read_literals(text: IncrementalText, name: str, notation: LiteralArguments) -> Reading[None]:
    """Reads arguments that are literals, and emits each as JSON when it is complete."""
    if not (yield from text.accept_words(notation.opening)) or not text.is_offered(name):
        raise NotACall
    separator = "{"
    while not (yield from text.accept_words(notation.closing)):
        argument = yield from _read_literal_argument(text, notation)
        is_over = yield from text.is_over()
        if separator == "{" and (argument is None or is_over):
            raise NotACall
        if argument is None:
            text.is_cut = False
            text.add_arguments("}")
            raise NotACall
        if separator == "{":
            text.start_call(name)
            text.is_cut = True
        text.discard()
        text.add_arguments(separator + argument if argument else "")
        if is_over:
            return
        separator = ", "
        yield from text.accept_words(",")
    if separator == "{":
        text.start_call(name)
    text.is_cut = False
    text.discard()
    text.add_arguments("{}" if separator == "{" else "}")


def _read_literal_argument(text: IncrementalText, notation: LiteralArguments) -> Reading[str | None]:
    """Reads a key and its value. Returns them as JSON, or as much of that as there is where the text ends within; None
    if they are none."""
    yield from text.read_spaces()
    begin = text.num_held
    while (yield from text.arrived()) and not (yield from text.next_is(_NO_KEY + notation.assign)):
        text.hold(1)
    key = text.held(begin)
    if not key or not (yield from text.accept_words(notation.assign)):
        return (json_text(key)[:-1] if key else "") if (yield from text.is_over()) else None
    literal = yield from read_literal(text)
    is_over = yield from text.is_over()
    try:
        return f"{json_text(key)}: {literal_json(literal)}"
    except NotACall:
        return f"{json_text(key)}: {_beginning(literal)}" if is_over else None


def _beginning(text: str) -> str:
    """Returns JSON that could go on, of a value that is cut off: the text itself, or a string that begins with it."""
    text = text.lstrip()
    if not text or (begins_json(text) and not _ends_before(text)):
        return text
    without_quote = text.removeprefix(QUOTE_MARK) if text.startswith(QUOTE_MARK) else text.removeprefix("'")
    return json_text(without_quote[: len(without_quote) - num_overlapping(without_quote, QUOTE_MARK)])[:-1]


def _ends_before(text: str) -> bool:
    """Whether more text follows a whole value of JSON."""
    try:
        return json.JSONDecoder().raw_decode(text)[1] < len(text.rstrip())
    except (ValueError, RecursionError):
        return False
