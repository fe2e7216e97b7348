"""Chat requests that other APIs' requests are translated to."""

from collections.abc import Mapping
from typing import Any

from server.protocol.chat import ChatRequest
from server.protocol.generation import SamplingFields
from server.protocol.request import RequestFields


def chat_request(request: RequestFields, fields: Mapping[str, Any]) -> ChatRequest:
    """Returns a chat request of `fields` and the sampling parameters of `request`. Raises ValidationError, with the
    names of the chat API."""
    shared = request.model_fields_set & SamplingFields.model_fields.keys()
    translated = ChatRequest.model_validate({name: getattr(request, name) for name in shared} | dict(fields))
    assert not translated.model_extra, translated.model_extra
    return translated


def given(**fields: Any) -> dict[str, Any]:
    """Returns the fields without those that ask for nothing."""
    return {name: value for name, value in fields.items() if value not in (None, [], {})}
