"""Grammars of tool calls: what they generate, the reader of the same format parses as calls."""

import re
from collections.abc import Sequence as Several
from dataclasses import replace

from engine.core.errors import GrammarError
from engine.grammar.lark import JsonSchema, JsonString, Lark, Literal, OneOf, Part, Regex, Repeat, Sequence, TextWithout
from server.protocol.tools import INPUT, Function, TextFunction
from server.tools.argument_grammar import Write, argument_parts, text_up_to
from server.tools.formats import CallFormat
from server.tools.spelling import HOLE, JsonArguments, Spelling

_MADE_UP = Regex("[A-Za-z0-9]{1,16}")


def as_text(text: str) -> tuple[Part, ...]:
    return (Literal(text),) if text else ()


def calls_only(form: CallFormat, functions: Several[Function], is_one: bool, write: Write = as_text) -> Part:
    """Returns a grammar of at least one call, each with arguments that satisfy its function's schema, and nothing
    else. Raises GrammarError for a schema that the format's grammar cannot express."""
    arguments = [arguments_part(form, function, write) for function in functions]
    return _calls(form.spelling, functions, arguments, is_one, write)


def strict_calls(form: CallFormat, functions: Several[Function], is_one: bool, write: Write = as_text) -> Part:
    """Returns a grammar of text in which whatever is parsed as a call is one; calls of strict functions satisfy their
    schemas. Raises GrammarError for one that cannot be expressed."""
    arguments = [
        arguments_part(form, each, write) if each.strict else _any_arguments(form.spelling, write) for each in functions
    ]
    if form.opening is None:
        calls = _calls(form.spelling, functions, arguments, is_one, write)
        return OneOf((calls, Regex(_text_that_is_no_call(form))))
    # The mark ends the text before it, and so begins a call wherever it stands: it must not be spelled again.
    spelling, mark = form.spelling, form.opening
    begin = spelling.begin.lstrip()
    if begin:
        opened = replace(spelling, begin=begin.removeprefix(mark))
    else:
        opened = replace(spelling, before_name=spelling.before_name.lstrip().removeprefix(mark))
    calls = _calls(opened, functions, arguments, is_one or not begin, write)
    marked = Sequence((text_up_to(mark, write), calls))
    return Sequence((Repeat(marked, 0, 1 if is_one else None), _text_without_part(mark)))


def arguments_of(function: Function) -> Part:
    """Returns a grammar of a function's arguments in JSON. Without parameters it is that of an empty object."""
    if isinstance(function, TextFunction):
        return Sequence((Literal(f'{{"{INPUT}": '), JsonString(Lark(function.grammar)), Literal("}")))
    closed = {"additionalProperties": False} if function.parameters is None else {}
    return JsonSchema({**function.schema_of_arguments, **closed})


def arguments_part(form: CallFormat, function: Function, write: Write = as_text) -> Part:
    """Returns a grammar of the arguments as the format writes them. Raises GrammarError if there is none."""
    schema = arguments_of(function)
    if isinstance(form.spelling.arguments, JsonArguments):
        return schema
    if not isinstance(schema, JsonSchema):
        raise GrammarError("a grammar for its text is not supported by this model's format of calls")
    return argument_parts(form.spelling.arguments, schema.schema, write)


def _any_arguments(spelling: Spelling, write: Write) -> Part:
    """Returns a grammar of any arguments. Those that are no JSON extend to the mark behind them."""
    if isinstance(spelling.arguments, JsonArguments):
        return JsonSchema({"type": "object"})
    return argument_parts(spelling.arguments, None, write)


def _calls(
    spelling: Spelling, functions: Several[Function], arguments: Several[Part], is_one: bool, write: Write
) -> Part:
    call = OneOf(
        tuple(
            Sequence(
                (
                    *_written(f"{spelling.before_name}{function.name}{spelling.before_arguments}", write),
                    part,
                    *_written(spelling.after_arguments, write),
                )
            )
            for function, part in zip(functions, arguments, strict=True)
        )
    )
    is_one = is_one or spelling.is_single
    more = [] if is_one else [Repeat(Sequence((*_written(spelling.between, write), call)))]
    return Sequence((*_written(spelling.begin, write), call, *more, *_written(spelling.end, write)))


def _written(text: str, write: Write) -> tuple[Part, ...]:
    """Returns the parts of a text of a spelling, with something made up in its holes."""
    first, *others = text.split(HOLE)
    return (*write(first), *(part for piece in others for part in (_MADE_UP, *write(piece))))


def _text_that_is_no_call(form: CallFormat) -> str:
    """Returns a regular expression of text that is not parsed as a call, for formats whose calls need no mark: it
    begins neither as a call nor as thinking, which a call may follow, and does not contain the format's optional
    mark."""
    rest = _text_without(form.marks[0]) if form.marks else "(?s:.*)"
    return rf"[ \t\r\n]*(?:[^ \t\r\n{{\[<]{rest})?"


def _text_without_part(mark: str) -> Part:
    return TextWithout("(?s:.*)", mark)


def _text_without(mark: str) -> str:
    """Returns a regular expression of all texts without `mark`. The mark's first character must be in it only once."""
    first, rest = re.escape(mark[0]), mark[1:]
    assert mark[0] not in rest
    follows = ""
    for character in map(re.escape, reversed(rest)):  # behind the first character: anything but the rest
        going_on = f"|{character}{follows}" if follows else ""
        follows = f"(?:[^{first}{character}][^{first}]*{going_on})?"
    return f"[^{first}]*(?:{first}{follows})*"
