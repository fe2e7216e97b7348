"""What a request demands of its text -> the grammar that the engine is given."""

import asyncio

from engine.core.errors import GrammarError
from engine.grammar.checker import GrammarChecker
from engine.grammar.lark import to_lark
from server.core.errors import BadRequestError
from server.protocol.structured import OutputConstraint


async def grammar_of(constraint: OutputConstraint | None, checker: GrammarChecker, caller: str) -> str | None:
    """Off the event loop, all of it. Raises BadRequestError for what cannot be followed, and OverloadedError where the
    caller (`record.caller_of`) has too many tried."""
    if constraint is None:
        return None
    try:
        grammar = await asyncio.to_thread(to_lark, constraint.source)
        await checker.check(grammar, caller)
    except GrammarError as error:
        raise BadRequestError(f"{constraint.param}: {error}.", constraint.param) from error
    return grammar
