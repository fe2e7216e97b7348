"""A request's constraint on its output -> the grammar that the engine is given."""

import asyncio

from engine.core.errors import GrammarError
from engine.grammar.checker import GrammarChecker
from engine.grammar.lark import to_lark
from server.core.errors import BadRequestError
from server.protocol.structured import OutputConstraint


async def grammar_of(constraint: OutputConstraint | None, checker: GrammarChecker, caller: str) -> str | None:
    """Returns the grammar, made and checked off the event loop. Raises BadRequestError for a constraint that cannot be
    followed, and OverloadedError if the caller (`record.caller_of`) has too many grammars in the check."""
    if constraint is None:
        return None
    try:
        grammar = await asyncio.to_thread(to_lark, constraint.source)
        await checker.check(await asyncio.to_thread(to_lark, constraint.source, tokens_as_text=True), caller)
    except GrammarError as error:
        raise BadRequestError(f"{constraint.param}: {error}.", constraint.param) from error
    return grammar
