"""Thinking before an answer: the marks around it, whether the prompt begins it, and how many tokens it took."""

import codecs
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from server.core.tokenizer_protocol import Tokenizer
from server.tools.incremental_text import IncrementalText, NotACall, Reading, attempt
from server.tools.learning import TOOLS, USER, Render, assistant
from server.tools.message_parts import Thought
from server.tools.readers import Reader

_NUM_LAST_TOKENS = 16  # more than enough to spell the mark and the white space after it
_THOUGHT = "rEaSoNiNg"
_LAST_MARK = re.compile(r"(<[^<>\s]+>\w*|\[[A-Z_]+\])\s*$")
_FIRST_MARK = re.compile(r"\s*(<[^<>]+>|\[[A-Z/_]+\])")


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The marks that a model writes before and after what it thinks."""

    opening: str
    closing: str


THINK = ThinkingMarks("<think>", "</think>")
HARMONY_ANALYSIS = ThinkingMarks("<|channel|>analysis<|message|>", "<|end|>")
_KNOWN = (
    THINK,
    ThinkingMarks("[THINK]", "[/THINK]"),
    ThinkingMarks("<seed:think>", "</seed:think>"),
    ThinkingMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkingMarks("<|channel>thought", "<channel|>"),
    ThinkingMarks("Here is my thought process:", "Here is my response:"),
    ThinkingMarks("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
"""Marks for templates that write them only before, or only in, what they ask the model for."""


def marks_in(source: str) -> ThinkingMarks | None:
    """Returns the known marks that a chat template mentions."""
    if "<|channel|>" in source and "<|message|>" in source:
        return HARMONY_ANALYSIS
    return next((marks for marks in _KNOWN if marks.opening in source or marks.closing in source), None)


def learn_marks(render: Render) -> ThinkingMarks | None:
    """Returns the marks that the template writes around the reasoning of an earlier message; None if it writes none."""
    thought = {"content": "text", "reasoning_content": _THOUGHT}
    for message in (assistant(**thought), assistant(("fnAlpha", {"keyOne": "x"}), **thought | {"content": ""})):
        before, found, after = (render([USER, message], TOOLS) or "").partition(_THOUGHT)
        opening, closing = _LAST_MARK.search(before), _FIRST_MARK.match(after)
        if found and opening and closing:
            known = next((marks for marks in _KNOWN if marks.closing == closing[1]), None)
            return known or _unless_a_turn(render, ThinkingMarks(opening[1], closing[1]))
    return None


def _unless_a_turn(render: Render, marks: ThinkingMarks) -> ThinkingMarks | None:
    """Returns the marks; None if they also stand around messages without reasoning."""
    plain = render([USER, assistant(content="text")], TOOLS) or ""
    return None if re.search(rf"{re.escape(marks.opening)}\s*text", plain) else marks


def after_thinking(reader: Reader, starts_inside: bool, marks: ThinkingMarks = THINK) -> Reader:
    """Returns a reader of a thought between the marks before the message that `reader` reads, and behind its calls.
    With `starts_inside` the prompt has opened the first."""

    def opens(text: IncrementalText) -> Reading[None]:
        yield from text.read_spaces()
        if not (yield from text.accept(marks.opening)):
            raise NotACall

    def read(text: IncrementalText) -> Reading[None]:
        text.thought_marks = marks.opening, marks.closing
        if starts_inside or (yield from attempt(text, opens)):
            yield from text.read_thought()
        yield from reader(text)

    return read


def begins_thinking(prompt_token_ids: Sequence[int], tokenizer: Tokenizer, marks: ThinkingMarks = THINK) -> bool:
    """Whether the prompt ends with the opening mark, so that the model thinks from its first token on."""
    end = tokenizer.decode(prompt_token_ids[-_NUM_LAST_TOKENS:], skip_special_tokens=False)
    return end.rstrip().endswith(marks.opening)


class NoThinking:
    """Counts no tokens, for models that do not think."""

    def add(self, token_ids: Iterable[int]) -> None:
        pass

    def num_tokens(self, thoughts: Sequence[Thought]) -> int:
        return 0


class ThinkingCounter:
    """Counts the tokens of thoughts, those of their marks included, by where in the text each token stands.

        text      <think>Hm.</think>So: <tool_call>...
        tokens    [0, 7) [7, 9) [9, 10) [10, 18) [18, 20) ...
        thought   [0,                       18)

    The text may come later than its tokens, because a stop string may begin with it: in a thought that has not ended,
    all tokens so far count.
    """

    def __init__(self, tokenizer: Tokenizer, skipped_ids: Set[int]) -> None:
        """`skipped_ids` are special tokens that are not in the text."""
        self._token_bytes = tokenizer.token_bytes
        self._skipped_ids = skipped_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begins, self._ends = array("Q"), array("Q")
        """Characters that each token adds to the text."""
        self._num_chars = 0

    def add(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._begins.append(self._num_chars)
            if token_id not in self._skipped_ids:
                self._num_chars += len(self._decoder.decode(self._token_bytes(token_id)))
            self._ends.append(self._num_chars)

    def num_tokens(self, thoughts: Sequence[Thought]) -> int:
        """Returns how many tokens so far are part of these thoughts. A token of two thoughts counts once."""
        count = last = 0
        for begin, end in thoughts:
            first = max(last, bisect_right(self._ends, begin)) if begin else 0  # the first may be half a character
            last = len(self._begins) if end is None else bisect_left(self._begins, end)
            count += last - first
        return count
