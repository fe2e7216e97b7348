"""How a model writes tool calls and thinking, according to its chat template or the settings."""

from dataclasses import dataclass

from server.tools.formats import BY_NAME, CallFormat, format_of
from server.tools.thinking import mentions_thinking


@dataclass(frozen=True, slots=True)
class Dialect:
    calls: CallFormat | None
    """The format of tool calls; None if calls cannot be parsed."""
    thinks: bool


@dataclass(frozen=True, slots=True)
class DialectSettings:
    """The parsers that the settings select: one by name, auto, or none."""

    tool_calls: str = "auto"
    reasoning: str = "auto"

    def dialect_of(self, template: str) -> Dialect:
        calls = format_of(template) if self.tool_calls == "auto" else BY_NAME.get(self.tool_calls)
        thinks = mentions_thinking(template) if self.reasoning == "auto" else self.reasoning == "think"
        return Dialect(calls, thinks)
