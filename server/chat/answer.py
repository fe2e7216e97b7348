"""How the answer to one chat request is parsed: which functions it may call, and whether the model thinks."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from engine.core.thinking_budget import ThinkingBudget
from engine.grammar.lark import Part, Token
from server.core.errors import BadRequestError
from server.core.tokenizer_protocol import Tokenizer
from server.protocol.chat import ChatRequest
from server.tools.call_grammar import as_text
from server.tools.formats import CallFormat
from server.tools.harmony import HARMONY_MARKS
from server.tools.incremental_text import Schema
from server.tools.message_parts import MessageParser, PlainParser
from server.tools.model_format import Dialect
from server.tools.parser import ReadingParser
from server.tools.readers import Reader, read_content
from server.tools.response_marks import RESPONSE_MARKS, WithoutResponseMarks
from server.tools.thinking import THINK, NoThinking, ThinkingCounter, ThinkingMarks, after_thinking, begins_thinking

_ID_LENGTH = 24


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What the model's output may contain besides content, and how it is parsed."""

    tokenizer: Tokenizer
    functions: Mapping[str, Schema]
    """The functions that may be called, with the schemas of their arguments."""
    is_one_call: bool
    """Whether calls after the first are left out."""
    calls: CallFormat | None
    """The format of calls; None where nothing may be called."""
    thinking: ThinkingMarks | None
    """The marks of thoughts; None if the model does not think."""
    begins_inside: bool
    """Whether the prompt has opened the thinking."""
    message: Reader | None = None
    """The reader of whole messages, for models whose content has marks, too."""
    marks_responses: bool = False
    """Whether there are marks around the answers behind thoughts, too."""
    skips_special_tokens: bool = True
    """Whether special tokens other than marks are left out of the text."""

    def parser(self, response_id: str, choice: int) -> MessageParser:
        reader = self._reader()
        if reader is None:
            return PlainParser()
        call_id = partial(self._call_id, response_id, choice)
        parser = ReadingParser(reader, self.functions, call_id, self.is_one_call)
        return WithoutResponseMarks(parser, *RESPONSE_MARKS) if self.marks_responses else parser

    def _reader(self) -> Reader | None:
        if self.message is not None and not self.begins_inside:
            return self.message
        reader = self.calls.read if self.calls else self.message
        if self.thinking is not None:
            return after_thinking(reader or read_content, self.begins_inside, self.thinking)
        return reader

    def thinking_counter(self) -> ThinkingCounter | NoThinking:
        if self.thinking is None:
            return NoThinking()
        skipped = self.tokenizer.special_ids if self.skips_special_tokens else frozenset[int]()
        return ThinkingCounter(self.tokenizer, skipped - frozenset(self.shown_token_ids))

    @property
    def shown_token_ids(self) -> tuple[int, ...]:
        """Marks that are special tokens, which would otherwise not be in the text."""
        marks = [*(self.calls.marks if self.calls else ())]
        if self.message is not None:
            marks += HARMONY_MARKS
        if self.thinking is not None:
            marks += (self.thinking.opening, self.thinking.closing)
        return self.special_ids(*marks)

    def special_ids(self, *texts: str) -> tuple[int, ...]:
        """Returns the ids of the special tokens in these texts, each once."""
        found = (token_id for text in texts for token_id in self.tokenizer.encode(text, add_special_tokens=False))
        return tuple(dict.fromkeys(token_id for token_id in found if token_id in self.tokenizer.special_ids))

    def written(self, text: str) -> tuple[Part, ...]:
        """Returns the text as parts of a grammar, in which marks that are special tokens are those tokens."""
        parts: list[Part] = []
        rest = text
        for token_id in self.tokenizer.encode(text, add_special_tokens=False):
            mark = self.tokenizer.decode([token_id], skip_special_tokens=False)
            if token_id in self.tokenizer.special_ids and mark in rest:
                before, _, rest = rest.partition(mark)
                parts += [*as_text(before), Token(token_id, mark)]
        return (*parts, *as_text(rest))

    def thinking_budget(self, max_tokens: int | None) -> ThinkingBudget | None:
        """Returns the budget for so many tokens of thinking. Raises BadRequestError if the model does not think, or has
        no tokens to end it with."""
        if max_tokens is None:
            return None
        if self.thinking is None:
            raise BadRequestError("thinking_token_budget: this model does not think.", "thinking_token_budget")
        marks = thinking_marks(self.tokenizer, self.thinking)
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
) -> AnswerFormat:
    """Returns what the answer may contain. Raises BadRequestError if it may contain calls that cannot be parsed."""
    functions = request.callable_functions
    if functions and dialect.calls is None:
        raise BadRequestError(
            "tools are not supported: how this model writes calls is not known here. "
            "If you run the server, see its option --tool-call-parser.",
            "tools",
        )
    marks = dialect.thinking
    return AnswerFormat(
        tokenizer=tokenizer,
        functions={function.name: function.schema_of_arguments for function in functions.values()},
        is_one_call=request.may_call_once,
        calls=dialect.calls if functions else None,
        thinking=marks,
        begins_inside=marks is not None and begins_thinking(prompt_token_ids, tokenizer, marks),
        message=dialect.message,
        marks_responses=marks is not None and dialect.marks_responses,
        skips_special_tokens=request.skip_special_tokens,
    )


def thinking_marks(tokenizer: Tokenizer, marks: ThinkingMarks = THINK) -> tuple[int, int] | None:
    """Returns the tokens that begin and end thinking; None if there are none, so that thinking cannot be bounded."""
    start_id, end_id = (_single_id(tokenizer, mark) for mark in (marks.opening, marks.closing))
    return None if start_id is None or end_id is None else (start_id, end_id)


def _single_id(tokenizer: Tokenizer, mark: str) -> int | None:
    """Returns the token that is this mark; None if there is none."""
    ids = tokenizer.encode(mark, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None
