"""Fields that one endpoint defines and another does not: it refuses them, for they would change its answer there."""

from collections.abc import Mapping
from typing import Any

from server.protocol.anthropic import MessagesRequest
from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.refusals import CHAT_REFUSALS, COMPLETION_REFUSALS, NEUTRAL, WITHOUT_EFFECT
from server.protocol.request import RequestFields
from server.protocol.responses import ResponsesRequest

_BODIES: dict[type[RequestFields], str] = {
    CompletionRequest: "/v1/completions",
    ChatRequest: "chat completions",
    ResponsesRequest: "/v1/responses",
    MessagesRequest: "/v1/messages",
    EmbeddingRequest: "/v1/embeddings",
}


def _defaults_by_name() -> dict[str, list[Any]]:
    """Every field of these bodies, with the values that ask for nothing."""
    values: dict[str, list[Any]] = {
        name: list(NEUTRAL.get(name, ())) for name in (*COMPLETION_REFUSALS, *CHAT_REFUSALS)
    }
    for body in _BODIES:
        for name, field in body.model_fields.items():
            values.setdefault(name, list(NEUTRAL.get(name, ()))).append(field.get_default(call_default_factory=True))
    return {name: neutral for name, neutral in values.items() if name not in WITHOUT_EFFECT}


_DEFAULTS = _defaults_by_name()


def find_stray(body: type[RequestFields], extra: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first field of another endpoint's that asks for something, with the reason why it is refused. Bodies that
    are only counted may have any."""
    if body not in _BODIES:
        return None
    for name in extra:
        if name in _DEFAULTS and extra[name] not in _DEFAULTS[name]:
            owners = [path for other, path in _BODIES.items() if name in other.model_fields]
            reason = f"belongs to {', '.join(owners)}" if owners else "is not supported by this server"
            return name, f"{name} {reason}."
    return None
