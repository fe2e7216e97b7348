"""Messages of requests -> messages in the form that a chat template expects, found by reading and probing it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.core.errors import InvalidParameterError
from engine.text.chat_template import ChatTemplate, Conversation
from server.protocol.messages import AssistantMessage, Message, MessageToolCall, TextPart
from server.tools.formats import mentions_tools
from server.tools.named_ids import with_named_ids

_PROBE = "pRoBe"
_HELLO = {"role": "user", "content": "Hello"}
_LATE_SYSTEM = [_HELLO, {"role": "system", "content": _PROBE}, {"role": "assistant", "content": "Hi"}, _HELLO]
_ID = "123456789"  # as Mistral's templates want it
_NO_CONTENT: Sequence[Mapping[str, Any]] = ({"content": None}, {"content": ""}, {})
"""What may stand for the content of a message that has calls only: null, as clients send it, an empty text, or
nothing."""


def _calling(content: Mapping[str, Any], name: str, arguments: Any, result: Any = "Done") -> list[dict[str, Any]]:
    """Returns a conversation in which a function is called."""
    call = {"id": _ID, "type": "function", "function": {"name": name, "arguments": arguments}}
    result_of_call = {"role": "tool", "tool_call_id": _ID, "content": result}
    return [_HELLO, {"role": "assistant", **content, "tool_calls": [call]}, result_of_call]


# A conversation of each role, with this content.
_SAYING: Mapping[str, Callable[[Any], list[dict[str, Any]]]] = {
    "system": lambda content: [{"role": "system", "content": content}, _HELLO],
    "developer": lambda content: [{"role": "developer", "content": content}, _HELLO],
    "user": lambda content: [{"role": "user", "content": content}],
    "assistant": lambda content: [_HELLO, {"role": "assistant", "content": content}],
    "tool": lambda content: _calling({"content": ""}, "f", {}, content),
}


@dataclass(frozen=True, slots=True)
class TemplateCapabilities:
    """What a chat template supports. Templates do not declare it: it is read from the source, or found by probes."""

    supports_tools: bool
    supports_tool_calls: bool
    supports_developer_role: bool
    """Whether the template names the role. Others would write it into the prompt of a model that never saw it."""
    supports_system_role: bool = True
    """Whether system messages reach the prompt: some templates refuse them, or leave them out."""
    supports_late_system_role: bool = True
    """Whether system messages behind the first turn reach the prompt."""
    roles_with_parts: frozenset[str] = frozenset()
    """Roles whose content must be a list of parts: the template does not write a text."""
    no_content: Mapping[str, Any] = field(default_factory=lambda: {"content": ""})
    """What stands for the content of a message that has calls only."""
    has_named_ids: bool = False
    """Whether the template writes the ids of calls and not the names, which the ids have to tell then."""
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
        calls, with_ids = (_calls_probes(template, named_tokens, shape) for shape in (list, with_named_ids))
        has_named_ids = not any(_PROBE in text for text in calls) and any(_PROBE in text for text in with_ids)
        roles_with_parts = frozenset(role for role in _SAYING if _needs_parts(template, role, named_tokens))
        return replace(
            read,
            supports_system_role="system" in roles_with_parts or _writes_text(template, "system", named_tokens),
            supports_late_system_role=_PROBE in _render_probe(template, _LATE_SYSTEM, named_tokens),
            roles_with_parts=roles_with_parts,
            no_content=_no_content(with_ids if has_named_ids else calls),
            has_named_ids=has_named_ids,
            accepts_malformed_arguments=read.accepts_malformed_arguments
            or any(
                _PROBE in _render_probe(template, _calling(each, "f", _PROBE), named_tokens) for each in _NO_CONTENT
            ),
        )


def _needs_parts(template: ChatTemplate, role: str, named_tokens: Mapping[str, str]) -> bool:
    """Whether a part's text reaches the prompt, and a text as it is does not."""
    if _writes_text(template, role, named_tokens):
        return False
    rendered = _render_probe(template, _SAYING[role](_as_parts(_PROBE)), named_tokens)
    return _PROBE in rendered and "'type'" not in rendered and '"type"' not in rendered


def _writes_text(template: ChatTemplate, role: str, named_tokens: Mapping[str, str]) -> bool:
    return _PROBE in _render_probe(template, _SAYING[role](_PROBE), named_tokens)


def _calls_probes(
    template: ChatTemplate,
    named_tokens: Mapping[str, str],
    shape: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
) -> list[str]:
    """Returns what is rendered of a call with each of `_NO_CONTENT`."""
    return [_render_probe(template, shape(_calling(each, _PROBE, {})), named_tokens) for each in _NO_CONTENT]


def _no_content(rendered: Sequence[str]) -> Mapping[str, Any]:
    """Returns the first of `_NO_CONTENT` with which the template neither fails nor writes Python's None."""
    taken = [(text.count("None"), index) for index, text in enumerate(rendered) if _PROBE in text]
    return _NO_CONTENT[min(taken)[1]] if taken else {"content": ""}


def _render_probe(template: ChatTemplate, messages: list[dict[str, Any]], named_tokens: Mapping[str, str]) -> str:
    """Returns the rendered prompt; an empty one if the template refuses the messages."""
    try:
        return template.render(Conversation(messages=messages), named_tokens)
    except InvalidParameterError:
        return ""


def shape_messages(messages: Iterable[Message], capabilities: TemplateCapabilities) -> list[dict[str, Any]]:
    """Returns the messages for a template. Each content is one text: `in_parts` comes last."""
    shaped = [_shape(message, capabilities) for message in messages]
    return with_named_ids(shaped) if capabilities.has_named_ids else shaped


def in_parts(messages: Iterable[dict[str, Any]], capabilities: TemplateCapabilities) -> list[dict[str, Any]]:
    """Returns the messages with the texts of those roles that need it as one part: some templates read the first
    only."""
    return [
        message | {"content": _as_parts(message["content"])}
        if message["role"] in capabilities.roles_with_parts and isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _as_parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


def _shape(message: Message, capabilities: TemplateCapabilities) -> dict[str, Any]:
    shaped: dict[str, Any] = message.model_dump(exclude_unset=True, exclude={"content"})
    if message.role == "developer" and not capabilities.supports_developer_role:
        shaped["role"] = "system"
    if isinstance(message, AssistantMessage) and message.tool_calls:
        shaped["tool_calls"] = [_call(call, capabilities) for call in message.tool_calls]
        if message.content is None and not message.refusal:
            return {**shaped, **capabilities.no_content}
    return shaped | {"content": text_of(message)}


def _call(call: MessageToolCall, capabilities: TemplateCapabilities) -> dict[str, Any]:
    """Returns the call with its arguments as an object."""
    return call.model_dump() | {"function": {"name": call.function.name, "arguments": _arguments(call, capabilities)}}


def _arguments(call: MessageToolCall, capabilities: TemplateCapabilities) -> dict[str, Any] | str:
    """Returns the arguments as an object. Malformed ones stay a string, or are empty if the template wants an
    object."""
    parsed = call.function.parsed_arguments
    if parsed is None:
        return call.function.arguments if capabilities.accepts_malformed_arguments else {}
    return parsed


def text_of(message: Message) -> str:
    """Returns the text of all parts, a line each; the refusal of an assistant's message without content."""
    match message.content:
        case str(text):
            return text
        case None:
            return (isinstance(message, AssistantMessage) and message.refusal) or ""
        case parts:
            return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in parts)
