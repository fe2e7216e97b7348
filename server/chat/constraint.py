"""The grammar of an answer behind its thinking: for required or strict calls, and for constraints on the content."""

from dataclasses import replace

from engine.grammar.checker import GrammarChecker
from engine.grammar.lark import JsonSchema, Lark, Literal, OneOf, Part, Regex, Sequence, TextUntil
from server.chat.answer import Answer
from server.core.errors import BadRequestError
from server.generation.grammar import grammar_of
from server.protocol.chat import ChatRequest
from server.protocol.structured import OutputConstraint
from server.tools.call_grammar import arguments_of, calls_only, strict_calls
from server.tools.formats import CallFormat
from server.tools.readers import THINK_CLOSE, THINK_OPEN

_LINE_BREAKS = Regex("\n{0,2}")  # that models write behind the thinking


async def chat_grammar(request: ChatRequest, answer: Answer, checker: GrammarChecker, caller: str) -> str | None:
    """Returns the grammar of the output; None if it is free. Raises BadRequestError for a constraint that cannot be
    followed, which names the function if it is a function's schema."""
    constraint = after_thinking(_answer_constraint(request, answer), answer)
    try:
        return await grammar_of(constraint, checker, caller)
    except BadRequestError:
        for index, function in request.callable_functions.items():
            if function.strict or request.must_call or request.constraint is not None:
                place = f"tools.{index}.function.parameters"
                await grammar_of(OutputConstraint(place, arguments_of(function)), checker, caller)
        raise


def after_thinking(constraint: OutputConstraint | None, answer: Answer) -> OutputConstraint | None:
    """Returns the constraint with free thinking before it. Raises BadRequestError where that cannot be expressed."""
    if constraint is None or not answer.thinks:
        return constraint
    if isinstance(constraint.source, Lark):
        raise _impossible(constraint, "a model that thinks, unless it is a schema, a regex or a choice")
    if answer.special_ids(THINK_OPEN, THINK_CLOSE):  # grammars are about text
        raise _impossible(constraint, "this model's thinking")
    return replace(constraint, source=_behind_thoughts(constraint.source, answer.begins_inside))


def _answer_constraint(request: ChatRequest, answer: Answer) -> OutputConstraint | None:
    """Returns the constraint on the answer itself. Where a call is required there is no content to constrain."""
    if answer.calls is None:
        return request.constraint
    functions, is_one = list(request.callable_functions.values()), request.may_call_once
    if request.must_call:
        return OutputConstraint("tool_choice", calls_only(answer.calls, functions, is_one))
    if request.constraint is not None:
        calls = calls_only(answer.calls, functions, is_one)
        return _content_or_calls(request.constraint, calls, _has_mark_in_text(answer, answer.calls))
    strict = [index for index, function in request.callable_functions.items() if function.strict]
    if not strict:
        return None
    if answer.calls.opening is not None and not _has_mark_in_text(answer, answer.calls):
        place = f"tools.{strict[0]}.function.strict"
        message = f'{place}: this model\'s calls can only be held to a schema with "tool_choice": "required".'
        raise BadRequestError(message, place)
    return OutputConstraint("tools", strict_calls(answer.calls, functions, is_one))


def _content_or_calls(constraint: OutputConstraint, calls: Part, have_mark: bool) -> OutputConstraint:
    """Returns a constraint to content or calls. Their first character must differ: JSON never begins like a mark."""
    if not isinstance(constraint.source, JsonSchema) or not have_mark:
        raise _impossible(
            constraint, 'tools that may be called, unless it is a schema and calls have a mark ("hermes")'
        )
    return replace(constraint, source=OneOf((constraint.source, calls)))


def _has_mark_in_text(answer: Answer, calls: CallFormat) -> bool:
    """Whether calls begin with a mark that is text: grammars are about text, which special tokens are not."""
    return calls.opening is not None and not answer.special_ids(calls.opening)


def _behind_thoughts(source: Part, begins_inside: bool) -> Part:
    thoughts = Sequence((TextUntil(THINK_CLOSE), _LINE_BREAKS, source))
    return thoughts if begins_inside else OneOf((Sequence((_LINE_BREAKS, Literal(THINK_OPEN), thoughts)), source))


def _impossible(constraint: OutputConstraint, what: str) -> BadRequestError:
    return BadRequestError(f"{constraint.param} cannot be combined with {what}.", constraint.param)
