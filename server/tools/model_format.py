"""How a model writes tool calls and thinking, according to its chat template or the settings."""

from dataclasses import dataclass

from server.tools.formats import BY_NAME, HARMONY, CallFormat, format_of, is_harmony, learned_format
from server.tools.learning import Render, id_length_of, learn_spelling, naming_ids, writes_calls
from server.tools.readers import Reader
from server.tools.response_marks import RESPONSE_MARKS
from server.tools.thinking import HARMONY_ANALYSIS, THINK, ThinkingMarks, learn_marks, marks_in


@dataclass(frozen=True, slots=True)
class Dialect:
    calls: CallFormat | None
    """The format of tool calls; None if calls cannot be parsed."""
    thinking: ThinkingMarks | None
    """The marks of thoughts; None if the model does not think."""
    marks_responses: bool = False
    """Whether there are marks around the answers behind thoughts, too."""

    @property
    def thinks(self) -> bool:
        return self.thinking is not None

    @property
    def message(self) -> Reader | None:
        """The reader of whole messages whose content has marks, too, so that it is not text by itself."""
        return HARMONY.read if self.calls is HARMONY or self.thinking is HARMONY_ANALYSIS else None


@dataclass(frozen=True, slots=True)
class DialectSettings:
    """The parsers that the settings select: one by name, auto, or none."""

    tool_calls: str = "auto"
    reasoning: str = "auto"

    def dialect_of(self, template: str, render: Render | None = None) -> Dialect:
        """Returns the dialect of a template. `render` renders with it; without that only its source is read."""
        calls = _learned(template, render) if self.tool_calls == "auto" else BY_NAME.get(self.tool_calls)
        marks_responses = all(mark in template for mark in RESPONSE_MARKS)
        if self.reasoning == "auto":
            learned = None if render is None or is_harmony(template) else learn_marks(render)
            return Dialect(calls, learned or marks_in(template), marks_responses)
        return Dialect(calls, (marks_in(template) or THINK) if self.reasoning == "think" else None, marks_responses)


def _learned(template: str, render: Render | None) -> CallFormat | None:
    named = format_of(template)
    if render is not None and not writes_calls(render):
        render = naming_ids(render)
    spelling = None if render is None or is_harmony(template) else learn_spelling(render)
    if render is None or spelling is None:
        return None if named is not HARMONY and render is not None and writes_calls(render) else named
    return learned_format(spelling, named, id_length_of(render))
