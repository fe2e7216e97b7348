"""Messages as the wire has them -> as a template expects them."""

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
class TemplateHabits:
    """What a template can take, which templates do not say."""

    knows_tools: bool
    knows_calls: bool
    knows_developer: bool
    """A template that never names the role would write it into the prompt of a model that never saw it."""
    knows_system: bool = True
    """Some templates refuse system messages, or leave them out."""
    roles_with_parts: frozenset[str] = frozenset()
    """Where content may be a list of parts. Most templates would write the list as Python does."""
    takes_broken_arguments: bool = False
    """Whether the arguments of a call may be a string: what the model wrote where that is no JSON object."""

    @classmethod
    def from_source(cls, source: str) -> "TemplateHabits":
        knows_developer = "'developer'" in source or '"developer"' in source
        knows_calls = "tool_calls" in source
        return cls(mentions_tools(source), knows_calls, knows_developer, takes_broken_arguments=not knows_calls)

    @classmethod
    def from_probes(cls, template: ChatTemplate, named_tokens: Mapping[str, str]) -> "TemplateHabits":
        """Found by trying, and looking."""
        read = cls.from_source(template.source)
        return replace(
            read,
            knows_system=_PROBE in _tried(template, _WITH_SYSTEM, named_tokens),
            roles_with_parts=frozenset(role for role in _PROBES if _writes_parts(template, role, named_tokens)),
            takes_broken_arguments=read.takes_broken_arguments or _PROBE in _tried(template, _CALLING, named_tokens),
        )


def _writes_parts(template: ChatTemplate, role: str, named_tokens: Mapping[str, str]) -> bool:
    rendered = _tried(template, _PROBES[role], named_tokens)
    return _PROBE in rendered and "'type'" not in rendered and '"type"' not in rendered


def _tried(template: ChatTemplate, messages: list[dict[str, Any]], named_tokens: Mapping[str, str]) -> str:
    """Empty if the template refuses the messages."""
    try:
        return template.render(Conversation(messages=messages), named_tokens)
    except InvalidParameterError:
        return ""


def shape_messages(messages: Iterable[Message], habits: TemplateHabits) -> list[dict[str, Any]]:
    return [_shape(message, habits) for message in messages]


def _shape(message: Message, habits: TemplateHabits) -> dict[str, Any]:
    shaped: dict[str, Any] = message.model_dump(exclude_unset=True)
    if message.role == "developer" and not habits.knows_developer:
        shaped["role"] = "system"
    if isinstance(message, AssistantMessage):
        shaped |= _assistant_fields(message, habits)
    if isinstance(message.content, list) and shaped["role"] not in habits.roles_with_parts:
        shaped["content"] = text_of(message)
    return shaped


def _assistant_fields(message: AssistantMessage, habits: TemplateHabits) -> dict[str, Any]:
    """Arguments as objects; content there even when it is null, for templates that ask."""
    fields: dict[str, Any] = {}
    if message.content is None:
        fields["content"] = message.refusal
    if message.tool_calls:
        fields["tool_calls"] = [
            call.model_dump() | {"function": {"name": call.function.name, "arguments": _arguments(call, habits)}}
            for call in message.tool_calls
        ]
    return fields


def _arguments(call: MessageToolCall, habits: TemplateHabits) -> dict[str, Any] | str:
    """Where they are no object and the template wants one, an empty one."""
    parsed = call.function.parsed_arguments
    if parsed is None:
        return call.function.arguments if habits.takes_broken_arguments else {}
    return parsed


def text_of(message: Message) -> str:
    """The text parts, a line each; of an assistant that said nothing else, the refusal."""
    match message.content:
        case str(text):
            return text
        case None:
            return (isinstance(message, AssistantMessage) and message.refusal) or ""
        case parts:
            return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in parts)
