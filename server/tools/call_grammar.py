"""Grammars of tool calls: what they generate, the reader of the same format parses as calls."""

import re
from collections.abc import Sequence as Several
from dataclasses import replace

from engine.grammar.lark import JsonSchema, Literal, OneOf, Part, Regex, Repeat, Sequence, TextUntil
from server.protocol.tools import Function
from server.tools.formats import CallFormat, Spelling

_ANY_ARGUMENTS = JsonSchema({"type": "object"})


def calls_only(form: CallFormat, functions: Several[Function], is_one: bool) -> Part:
    """Returns a grammar of at least one call, each with arguments that satisfy its function's schema, and nothing
    else."""
    return _calls(form.spelling, functions, [arguments_of(function) for function in functions], is_one)


def strict_calls(form: CallFormat, functions: Several[Function], is_one: bool) -> Part:
    """Returns a grammar of text in which whatever is parsed as a call is one; calls of strict functions satisfy their
    schemas."""
    arguments = [arguments_of(function) if function.strict else _ANY_ARGUMENTS for function in functions]
    if form.opening is None:
        return OneOf((_calls(form.spelling, functions, arguments, is_one), Regex(_text_that_is_no_call(form))))
    # The mark ends the text before it, and so begins a call wherever it stands: it must not be spelled again.
    spelling, mark = form.spelling, form.opening
    if spelling.begin:
        calls = _calls(replace(spelling, begin=spelling.begin.removeprefix(mark)), functions, arguments, is_one)
    else:
        calls = _calls(
            replace(spelling, before_name=spelling.before_name.removeprefix(mark)), functions, arguments, True
        )
    marked = Sequence((TextUntil(mark), calls))
    return Sequence((Repeat(marked, 0, 1 if is_one else None), Regex(_text_without(mark))))


def arguments_of(function: Function) -> JsonSchema:
    """Returns the schema of a function's arguments. Without parameters it is that of an empty object."""
    closed = {"additionalProperties": False} if function.parameters is None else {}
    return JsonSchema({**function.schema_of_arguments, **closed})


def _calls(spelling: Spelling, functions: Several[Function], arguments: Several[JsonSchema], is_one: bool) -> Part:
    call = OneOf(
        tuple(
            Sequence(
                (
                    Literal(f"{spelling.before_name}{function.name}{spelling.before_arguments}"),
                    schema,
                    *_literal(spelling.after_arguments),
                )
            )
            for function, schema in zip(functions, arguments, strict=True)
        )
    )
    more = [] if is_one else [Repeat(Sequence((*_literal(spelling.between), call)))]
    return Sequence((*_literal(spelling.begin), call, *more, *_literal(spelling.end)))


def _literal(text: str) -> tuple[Literal, ...]:
    return (Literal(text),) if text else ()


def _text_that_is_no_call(form: CallFormat) -> str:
    """Returns a regular expression of text that is not parsed as a call, for formats whose calls need no mark: it
    begins neither as a call nor as thinking, which a call may follow, and does not contain the format's optional
    mark."""
    rest = _text_without(form.marks[0]) if form.marks else "(?s:.*)"
    return rf"[ \t\r\n]*(?:[^ \t\r\n{{\[<]{rest})?"


def _text_without(mark: str) -> str:
    """Returns a regular expression of all texts without `mark`. The mark's first character must be in it only once."""
    first, rest = re.escape(mark[0]), mark[1:]
    assert mark[0] not in rest
    follows = ""
    for character in map(re.escape, reversed(rest)):  # behind the first character: anything but the rest
        going_on = f"|{character}{follows}" if follows else ""
        follows = f"(?:[^{first}{character}][^{first}]*{going_on})?"
    return f"[^{first}]*(?:{first}{follows})*"
