"""A request's constraint on its output -> the grammar that the engine is given."""

from engine.core.errors import GrammarError
from engine.grammar.checker import GrammarChecker
from server.core.errors import BadRequestError
from server.protocol.structured import OutputConstraint


async def grammar_of(constraint: OutputConstraint | None, checker: GrammarChecker, caller: str) -> str | None:
    """Returns the grammar, made and checked off the event loop, in the caller's turn. Raises BadRequestError for a
    constraint that cannot be followed, and OverloadedError if the caller (`record.caller_of`) has too many grammars in
    the check."""
    if constraint is None:
        return None
    try:
        return await checker.checked(constraint.source, caller)
    except GrammarError as error:
        raise BadRequestError(f"{constraint.param}: {error}.", constraint.param) from error
