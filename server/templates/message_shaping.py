"""Messages of requests -> messages in the form that a chat template expects, found by reading and probing it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.core.errors import InvalidParameterError
from engine.text.chat_template import ChatTemplate, Conversation
from server.protocol.messages import AssistantMessage, Message, MessageToolCall, TextPart
from server.tools.formats import mentions_tools

_PROBE = "pRoBe"
_PARTS = [{"type": "text", "text": _PROBE}]
_HELLO = {"role": "user", "content": "Hello"}
_WITH_SYSTEM = [{"role": "system", "content": _PROBE}, _HELLO]
_PROBES: dict[str, list[dict[str, Any]]] = {
    "system": [{"role": "system", "content": _PARTS}, _HELLO],
    "user": [{"role": "user", "content": _PARTS}],
    "assistant": [_HELLO, {"role": "assistant", "content": _PARTS}],
}
_ID = "123456789"  # as Mistral's templates want it
_CALL = {"id": _ID, "type": "function", "function": {"name": "f", "arguments": _PROBE}}
_CALLING: list[dict[str, Any]] = [
    _HELLO,
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": _ID, "content": "Done"},
]


@dataclass(frozen=True, slots=True)
class TemplateCapabilities:
    """What a chat template supports. Templates do not declare it: it is read from the source, or found by probes."""

    supports_tools: bool
    supports_tool_calls: bool
    supports_developer_role: bool
    """Whether the template names the role. Others would write it into the prompt of a model that never saw it."""
    supports_system_role: bool = True
    """Whether system messages reach the prompt: some templates refuse them, or leave them out."""
    roles_with_parts: frozenset[str] = frozenset()
    """Roles whose content may be a list of parts. Most templates would write the list as Python does."""
    accepts_malformed_arguments: bool = False
    """Whether a call's arguments may be a string, as which malformed ones are kept."""

    @classmethod
    def from_source(cls, source: str) -> "TemplateCapabilities":
        supports_developer_role = "'developer'" in source or '"developer"' in source
        supports_tool_calls = "tool_calls" in source
        return cls(
            mentions_tools(source),
            supports_tool_calls,
            supports_developer_role,
            accepts_malformed_arguments=not supports_tool_calls,
        )

    @classmethod
    def from_probes(cls, template: ChatTemplate, named_tokens: Mapping[str, str]) -> "TemplateCapabilities":
        """Returns what rendering a few conversations shows of the template."""
        read = cls.from_source(template.source)
        return replace(
            read,
            supports_system_role=_PROBE in _render_probe(template, _WITH_SYSTEM, named_tokens),
            roles_with_parts=frozenset(role for role in _PROBES if _writes_parts(template, role, named_tokens)),
            accepts_malformed_arguments=read.accepts_malformed_arguments
            or _PROBE in _render_probe(template, _CALLING, named_tokens),
        )


def _writes_parts(template: ChatTemplate, role: str, named_tokens: Mapping[str, str]) -> bool:
    rendered = _render_probe(template, _PROBES[role], named_tokens)
    return _PROBE in rendered and "'type'" not in rendered and '"type"' not in rendered


def _render_probe(template: ChatTemplate, messages: list[dict[str, Any]], named_tokens: Mapping[str, str]) -> str:
    """Returns the rendered prompt; an empty one if the template refuses the messages."""
    try:
        return template.render(Conversation(messages=messages), named_tokens)
    except InvalidParameterError:
        return ""


def shape_messages(messages: Iterable[Message], capabilities: TemplateCapabilities) -> list[dict[str, Any]]:
    return [_shape(message, capabilities) for message in messages]


def _shape(message: Message, capabilities: TemplateCapabilities) -> dict[str, Any]:
    shaped: dict[str, Any] = message.model_dump(exclude_unset=True)
    if message.role == "developer" and not capabilities.supports_developer_role:
        shaped["role"] = "system"
    if isinstance(message, AssistantMessage):
        shaped |= _assistant_fields(message, capabilities)
    if isinstance(message.content, list) and shaped["role"] not in capabilities.roles_with_parts:
        shaped["content"] = text_of(message)
    return shaped


def _assistant_fields(message: AssistantMessage, capabilities: TemplateCapabilities) -> dict[str, Any]:
    """Returns calls with their arguments as objects, and content even if it is null, for templates that test it."""
    fields: dict[str, Any] = {}
    if message.content is None:
        fields["content"] = message.refusal
    if message.tool_calls:
        fields["tool_calls"] = [
            call.model_dump() | {"function": {"name": call.function.name, "arguments": _arguments(call, capabilities)}}
            for call in message.tool_calls
        ]
    return fields


def _arguments(call: MessageToolCall, capabilities: TemplateCapabilities) -> dict[str, Any] | str:
    """Returns the arguments as an object. Malformed ones stay a string, or are empty if the template wants an
    object."""
    parsed = call.function.parsed_arguments
    if parsed is None:
        return call.function.arguments if capabilities.accepts_malformed_arguments else {}
    return parsed


def text_of(message: Message) -> str:
    """Returns the text parts, a line each; the refusal of an assistant's message without content."""
    match message.content:
        case str(text):
            return text
        case None:
            return (isinstance(message, AssistantMessage) and message.refusal) or ""
        case parts:
            return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in parts)
