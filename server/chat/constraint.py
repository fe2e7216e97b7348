"""The grammar of an answer behind its thinking: for required or strict calls, and for constraints on the content."""

from dataclasses import replace

from engine.core.errors import GrammarError
from engine.grammar.checker import GrammarChecker
from engine.grammar.lark import JsonSchema, Lark, OneOf, Part, Regex, Sequence
from server.chat.answer import AnswerFormat
from server.core.errors import BadRequestError
from server.generation.grammar import grammar_of
from server.protocol.chat import ChatRequest
from server.protocol.structured import OutputConstraint
from server.protocol.tools import Function
from server.tools.argument_grammar import text_up_to
from server.tools.call_grammar import arguments_of, arguments_part, calls_only, strict_calls
from server.tools.formats import CallFormat
from server.tools.harmony import FINAL, NEXT_MESSAGE
from server.tools.thinking import ThinkingMarks

_LINE_BREAKS = Regex("\n{0,2}")  # that models write behind the thinking


async def chat_grammar(request: ChatRequest, answer: AnswerFormat, checker: GrammarChecker, caller: str) -> str | None:
    """Returns the grammar of the output; None if it is free. Raises BadRequestError for a constraint that cannot be
    followed, which names the function if it is a function's schema."""
    try:
        constraint = after_thinking(_answer_constraint(request, answer), answer)
        return await grammar_of(constraint, checker, caller)
    except (BadRequestError, GrammarError):
        for index, function in request.callable_functions.items():
            if function.strict or request.must_call or request.constraint is not None:
                place = f"tools.{index}.function.parameters"
                await grammar_of(OutputConstraint(place, _arguments(function, answer, place)), checker, caller)
        raise


def _arguments(function: Function, answer: AnswerFormat, place: str) -> Part:
    """Returns the grammar of a function's arguments. Raises BadRequestError if there is none in the model's format."""
    try:
        return arguments_of(function) if answer.calls is None else arguments_part(answer.calls, function)
    except GrammarError as error:
        raise BadRequestError(f"{place}: {error}.", place) from error


def after_thinking(constraint: OutputConstraint | None, answer: AnswerFormat) -> OutputConstraint | None:
    """Returns the constraint with free thinking before it. Raises BadRequestError where that cannot be expressed."""
    if constraint is None or answer.thinking is None:
        return constraint
    if isinstance(constraint.source, Lark):
        raise _impossible(constraint, "a model that thinks, unless it is a schema, a regex or a choice")
    return replace(constraint, source=_behind_thoughts(constraint.source, answer, answer.thinking))


def _answer_constraint(request: ChatRequest, answer: AnswerFormat) -> OutputConstraint | None:
    """Returns the constraint on the answer itself. Where a call is required there is no content to constrain."""
    form = answer.calls
    if form is None:
        return _in_content(request.constraint, answer)
    functions, is_one = list(request.callable_functions.values()), request.may_call_once
    if request.must_call:
        return OutputConstraint("tool_choice", calls_only(form, functions, is_one, answer.written))
    if request.constraint is not None:
        calls = calls_only(form, functions, is_one, answer.written)
        return _content_or_calls(request.constraint, calls, answer, form)
    if not any(function.strict for function in functions):
        return None
    return OutputConstraint("tools", strict_calls(form, functions, is_one, answer.written))


def _content_or_calls(
    constraint: OutputConstraint, calls: Part, answer: AnswerFormat, form: CallFormat
) -> OutputConstraint:
    """Returns a constraint to content or calls. Their first character must differ: JSON never begins like a mark."""
    if not isinstance(constraint.source, JsonSchema) or form.opening is None:
        raise _impossible(constraint, "tools that may be called, unless it is a schema and calls have a mark")
    header = answer.written(FINAL) if answer.message is not None else ()
    return replace(constraint, source=OneOf((Sequence((*header, constraint.source)), calls)))


def _in_content(constraint: OutputConstraint | None, answer: AnswerFormat) -> OutputConstraint | None:
    """Returns the constraint behind the header of content, where messages have headers. Raises BadRequestError for a
    grammar in Lark there."""
    if constraint is None or answer.message is None:
        return constraint
    if isinstance(constraint.source, Lark):
        raise _impossible(constraint, "this model's channels, unless it is a schema, a regex or a choice")
    return replace(constraint, source=Sequence((*answer.written(FINAL), constraint.source)))


def _behind_thoughts(source: Part, answer: AnswerFormat, marks: ThinkingMarks) -> Part:
    """Returns a grammar of a thought and `source`; it may be left out unless the prompt has begun it."""
    begins_next = answer.written(NEXT_MESSAGE) if answer.message is not None else (_LINE_BREAKS,)
    thoughts = Sequence((text_up_to(marks.closing, answer.written), *begins_next, source))
    if answer.begins_inside:
        return thoughts
    return OneOf((Sequence((_LINE_BREAKS, *answer.written(marks.opening), thoughts)), source))


def _impossible(constraint: OutputConstraint, what: str) -> BadRequestError:
    return BadRequestError(f"{constraint.param} cannot be combined with {what}.", constraint.param)
