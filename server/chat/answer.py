"""How the answer to one chat request is parsed: which functions it may call, and whether the model thinks."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from engine.core.thinking_budget import ThinkingBudget
from server.core.errors import BadRequestError
from server.core.tokenizer_protocol import Tokenizer
from server.protocol.chat import ChatRequest
from server.tools.dialect import Dialect
from server.tools.formats import CallFormat
from server.tools.message_parts import MessageParser, PlainParser
from server.tools.parser import ReadingParser
from server.tools.readers import THINK_CLOSE, THINK_OPEN, after_thinking, read_content
from server.tools.thinking import NoThinking, ThinkingCounter, begins_thinking

_ID_LENGTH = 24


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model's output may contain besides content, and how it is parsed."""

    tokenizer: Tokenizer
    names: frozenset[str]
    """Names of the functions that may be called."""
    is_one_call: bool
    """Whether calls after the first are left out."""
    calls: CallFormat | None
    """The format of calls; None where nothing may be called."""
    thinks: bool
    begins_inside: bool
    """Whether the prompt has opened the thinking."""

    def parser(self, response_id: str, choice: int) -> MessageParser:
        if self.calls is None and not self.thinks:
            return PlainParser()
        reader = read_content if self.calls is None else self.calls.read
        if self.thinks:
            reader = after_thinking(reader, self.begins_inside)
        return ReadingParser(reader, self.names, partial(self._call_id, response_id, choice), self.is_one_call)

    def thinking_counter(self) -> ThinkingCounter | NoThinking:
        return ThinkingCounter(self.tokenizer, self.begins_inside) if self.thinks else NoThinking()

    @property
    def shown_token_ids(self) -> tuple[int, ...]:
        """Marks that are special tokens, which would otherwise not be in the text."""
        marks = (*(self.calls.marks if self.calls else ()), *((THINK_OPEN, THINK_CLOSE) if self.thinks else ()))
        return self.special_ids(*marks)

    def special_ids(self, *marks: str) -> tuple[int, ...]:
        """Returns the ids of those `marks` that are special tokens."""
        ids = (_single_id(self.tokenizer, mark) for mark in marks)
        return tuple(token_id for token_id in ids if token_id is not None and token_id in self.tokenizer.special_ids)

    def thinking_budget(self, max_tokens: int | None) -> ThinkingBudget | None:
        """Returns the budget for so many tokens of thinking. Raises BadRequestError if the model does not think, or has
        no tokens to end it with."""
        if max_tokens is None:
            return None
        if not self.thinks:
            raise BadRequestError("thinking_token_budget: this model does not think.", "thinking_token_budget")
        marks = thinking_marks(self.tokenizer)
        if marks is None:
            message = "thinking_token_budget is not supported: this model has no tokens that begin and end thinking."
            raise BadRequestError(message, "thinking_token_budget")
        start_id, end_id = marks
        return ThinkingBudget(max_tokens=max_tokens, end_id=end_id, start_id=None if self.begins_inside else start_id)

    def _call_id(self, response_id: str, choice: int, index: int) -> str:
        """Returns a call's id, derived from the response's: a repeated or resumed stream names its calls as before."""
        digest = hashlib.sha256(f"{response_id}/{choice}/{index}".encode()).hexdigest()
        if self.calls is not None and self.calls.id_length is not None:
            return digest[: self.calls.id_length]
        return f"call_{digest[:_ID_LENGTH]}"


def expected_answer(
    request: ChatRequest, dialect: Dialect, prompt_token_ids: Sequence[int], tokenizer: Tokenizer
) -> Answer:
    """Returns what the answer may contain. Raises BadRequestError if it may contain calls that cannot be parsed."""
    functions = request.callable_functions
    if functions and dialect.calls is None:
        raise BadRequestError(
            "tools are not supported: how this model writes calls is not known here. "
            "If you run the server, see its option --tool-call-parser.",
            "tools",
        )
    return Answer(
        tokenizer=tokenizer,
        names=frozenset(function.name for function in functions.values()),
        is_one_call=request.may_call_once,
        calls=dialect.calls if functions else None,
        thinks=dialect.thinks,
        begins_inside=dialect.thinks and begins_thinking(prompt_token_ids, tokenizer),
    )


def thinking_marks(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Returns the tokens that begin and end thinking; None if there are none, so that thinking cannot be bounded."""
    start_id, end_id = (_single_id(tokenizer, mark) for mark in (THINK_OPEN, THINK_CLOSE))
    return None if start_id is None or end_id is None else (start_id, end_id)


def _single_id(tokenizer: Tokenizer, mark: str) -> int | None:
    """Returns the token that is this mark; None if there is none."""
    ids = tokenizer.encode(mark, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None
