"""What a chat's text must follow, where thinking comes first."""

from dataclasses import replace

from engine.grammar_source import Lark, Literal, OneOf, Part, Regex, Sequence, TextUntil
from server.chat.answer import Answer
from server.errors import BadRequestError
from server.protocol.structured import Demand
from server.tools.readers import THINK_CLOSE, THINK_OPEN

_LINE_BREAKS = Regex("\n{0,2}")  # that models write behind the thinking


def after_thinking(demand: Demand | None, answer: Answer) -> Demand | None:
    """The demand is on what follows the thinking. Raises BadRequestError where it cannot be."""
    if demand is None:
        return None
    if answer.calls is not None:
        raise _impossible(demand, "tools that may be called")
    if not answer.thinks:
        return demand
    if isinstance(demand.source, Lark):
        raise _impossible(demand, "a model that thinks, unless it is a schema, a regex or a choice")
    if answer.shown_token_ids:  # the marks are special tokens, and grammars are about text
        raise _impossible(demand, "this model's thinking")
    return replace(demand, source=_behind_thoughts(demand.source, answer.begins_inside))


def _behind_thoughts(source: Part, begins_inside: bool) -> Part:
    thoughts = Sequence((TextUntil(THINK_CLOSE), _LINE_BREAKS, source))
    return thoughts if begins_inside else OneOf((Sequence((_LINE_BREAKS, Literal(THINK_OPEN), thoughts)), source))


def _impossible(demand: Demand, what: str) -> BadRequestError:
    return BadRequestError(f"{demand.param} cannot be combined with {what}.", demand.param)
