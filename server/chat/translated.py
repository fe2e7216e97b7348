"""Chat requests that other APIs' requests are translated to."""

from collections.abc import Mapping
from typing import Any

from server.core.errors import BadRequestError
from server.protocol.chat import ChatRequest
from server.protocol.generation import SamplingFields
from server.protocol.request import RequestFields
from server.tools.json_text import json_text


def chat_request(request: RequestFields, fields: Mapping[str, Any]) -> ChatRequest:
    """Returns a chat request of `fields` and the sampling parameters of `request`. Raises ValidationError, with the
    names of the chat API."""
    shared = request.model_fields_set & SamplingFields.model_fields.keys()
    translated = ChatRequest.model_validate({name: getattr(request, name) for name in shared} | dict(fields))
    assert not translated.model_extra, translated.model_extra
    return translated


def chat_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call of a conversation. Raises BadRequestError for arguments that are nested too deeply."""
    try:
        text = json_text(arguments)
    except RecursionError:
        raise BadRequestError(f"The arguments of a call of {name[:100]!r} are nested too deeply.", "messages") from None
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def given(**fields: Any) -> dict[str, Any]:
    """Returns the fields without those that ask for nothing."""
    return {name: value for name, value in fields.items() if value not in (None, [], {})}
