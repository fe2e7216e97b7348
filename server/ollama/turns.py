"""Messages of Ollama's API -> those of the chat API, whose calls have ids and whose results name them."""

from collections.abc import Sequence
from typing import Any

from server.chat.translated import chat_call, given
from server.core.errors import BadRequestError
from server.protocol.ollama import OllamaMessage


def messages_of(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Returns the messages for a chat request. Raises BadRequestError for a tool's result without a call before it."""
    open_calls: list[tuple[str, str]] = []
    translated = []
    for place, message in enumerate(messages):
        fields = {"role": message.role, "content": message.content, **(message.model_extra or {})}
        if message.role == "tool":
            fields["tool_call_id"] = _answered_call(message, open_calls, place)
        elif message.tool_calls:
            calls = [(call.id or f"call_{place}_{index}", call) for index, call in enumerate(message.tool_calls)]
            open_calls = [(call_id, call.function.name) for call_id, call in calls]
            fields["tool_calls"] = [
                chat_call(each, call.function.name, call.function.arguments) for each, call in calls
            ]
        translated.append(fields | given(name=message.tool_name, reasoning_content=message.thinking))
    return translated


def _answered_call(message: OllamaMessage, open_calls: list[tuple[str, str]], place: int) -> str:
    """Returns the id of the call that a result belongs to: the one that it names, or else the first of its tool's name
    that has no result yet; without a name, the first. Takes the call off the list."""
    if message.tool_call_id is not None:
        open_calls[:] = [each for each in open_calls if each[0] != message.tool_call_id]
        return message.tool_call_id
    for index, (call_id, name) in enumerate(open_calls):
        if message.tool_name in (None, name):
            del open_calls[index]
            return call_id
    name = f"of {message.tool_name[:100]!r} " if message.tool_name else ""
    raise BadRequestError(f"messages.{place}: There is no call {name}before this result of a tool.", "messages")
