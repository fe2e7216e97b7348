"""How a model writes what is not content, as its chat template tells or the settings say."""

from dataclasses import dataclass

from server.tools.formats import BY_NAME, CallFormat, format_of
from server.tools.thinking import mentions_thinking


@dataclass(frozen=True, slots=True)
class Dialect:
    calls: CallFormat | None
    """None if calls cannot be read."""
    thinks: bool


@dataclass(frozen=True, slots=True)
class DialectSettings:
    """The parsers that the settings name: one of them, or auto, or none."""

    tool_calls: str = "auto"
    reasoning: str = "auto"

    def dialect_of(self, template: str) -> Dialect:
        calls = format_of(template) if self.tool_calls == "auto" else BY_NAME.get(self.tool_calls)
        thinks = mentions_thinking(template) if self.reasoning == "auto" else self.reasoning == "think"
        return Dialect(calls, thinks)
