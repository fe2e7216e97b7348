"""Messages as the wire has them -> as a template expects them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.chat_template import ChatTemplate, Conversation
from engine.errors import InvalidParameterError
from server.protocol.messages import AssistantMessage, Message, TextPart
from server.tools.formats import mentions_tools

_PROBE = "pRoBe"
_PARTS = [{"type": "text", "text": _PROBE}]
_HELLO = {"role": "user", "content": "Hello"}
_PROBES: dict[str, list[dict[str, Any]]] = {
    "system": [{"role": "system", "content": _PARTS}, _HELLO],
    "user": [{"role": "user", "content": _PARTS}],
    "assistant": [_HELLO, {"role": "assistant", "content": _PARTS}],
}


@dataclass(frozen=True, slots=True)
class TemplateHabits:
    """What a template can take, which templates do not say."""

    knows_tools: bool
    knows_calls: bool
    knows_developer: bool
    """A template that never names the role would write it into the prompt of a model that never saw it."""
    roles_with_parts: frozenset[str] = frozenset()
    """Where content may be a list of parts. Most templates would write the list as Python does."""

    @classmethod
    def from_source(cls, source: str) -> "TemplateHabits":
        knows_developer = "'developer'" in source or '"developer"' in source
        return cls(mentions_tools(source), "tool_calls" in source, knows_developer)

    @classmethod
    def from_probes(cls, template: ChatTemplate, named_tokens: Mapping[str, str]) -> "TemplateHabits":
        """Found by trying, and looking."""
        roles = frozenset(role for role in _PROBES if _writes_parts(template, role, named_tokens))
        return replace(cls.from_source(template.source), roles_with_parts=roles)


def _writes_parts(template: ChatTemplate, role: str, named_tokens: Mapping[str, str]) -> bool:
    try:
        rendered = template.render(Conversation(messages=_PROBES[role]), named_tokens)
    except InvalidParameterError:
        return False
    return _PROBE in rendered and "'type'" not in rendered and '"type"' not in rendered


def shape_messages(messages: Iterable[Message], habits: TemplateHabits) -> list[dict[str, Any]]:
    return [_shape(message, habits) for message in messages]


def _shape(message: Message, habits: TemplateHabits) -> dict[str, Any]:
    shaped: dict[str, Any] = message.model_dump(exclude_unset=True)
    if message.role == "developer" and not habits.knows_developer:
        shaped["role"] = "system"
    if isinstance(message, AssistantMessage):
        shaped |= _assistant_fields(message)
    if isinstance(message.content, list) and shaped["role"] not in habits.roles_with_parts:
        shaped["content"] = text_of(message)
    return shaped


def _assistant_fields(message: AssistantMessage) -> dict[str, Any]:
    """Arguments as objects; content there even when it is null, for templates that ask."""
    fields: dict[str, Any] = {}
    if message.content is None:
        fields["content"] = message.refusal
    if message.tool_calls:
        fields["tool_calls"] = [
            call.model_dump() | {"function": {"name": call.function.name, "arguments": call.function.parsed_arguments}}
            for call in message.tool_calls
        ]
    return fields


def text_of(message: Message) -> str:
    """The text parts, a line each; of an assistant that said nothing else, the refusal."""
    match message.content:
        case str(text):
            return text
        case None:
            return (isinstance(message, AssistantMessage) and message.refusal) or ""
        case parts:
            return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in parts)
