"""Fields that only other endpoints define are refused: there they change the answer, so ignoring them would mislead."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from server.protocol.anthropic import MessagesRequest
from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.ollama import OllamaChatRequest, OllamaGenerateRequest
from server.protocol.ollama_embeddings import EmbedRequest, OlderEmbedRequest
from server.protocol.refusals import CHAT_REFUSALS, COMPLETION_REFUSALS, NEUTRAL, WITHOUT_EFFECT
from server.protocol.request import RequestFields
from server.protocol.responses import ResponsesRequest

_BODIES: dict[type[RequestFields], str] = {
    CompletionRequest: "/v1/completions",
    ChatRequest: "chat completions",
    ResponsesRequest: "/v1/responses",
    MessagesRequest: "/v1/messages",
    EmbeddingRequest: "/v1/embeddings",
    OllamaChatRequest: "/api/chat",
    OllamaGenerateRequest: "/api/generate",
    EmbedRequest: "/api/embed",
    OlderEmbedRequest: "/api/embeddings",
}


_KNOWN = frozenset(chain(*(body.model_fields for body in _BODIES), COMPLETION_REFUSALS, CHAT_REFUSALS)) - WITHOUT_EFFECT


def _neutral_values() -> dict[str, list[Any]]:
    """Returns the values that ask for nothing, by field: those in `NEUTRAL`, and all endpoints' defaults that
    are off, zero or empty."""
    values: dict[str, list[Any]] = {name: list(each) for name, each in NEUTRAL.items()}
    for name, field in chain.from_iterable(body.model_fields.items() for body in _BODIES):
        default = field.get_default(call_default_factory=True)
        if default in (False, "", [], {}):
            values.setdefault(name, []).append(default)
    return values


_NEUTRAL_VALUES = _neutral_values()


def find_refused(
    body: type[RequestFields], extra: Mapping[str, Any], refusals: Mapping[str, str]
) -> tuple[str, str] | None:
    """Returns the first field that asks for something and that this endpoint refuses or only another one defines, and
    the error's message. Bodies that are only counted may have any field of other endpoints."""
    for name, value in extra.items():
        reason = refusals.get(name) or _reason_for_stray_field(body, name)
        if reason is not None and not _is_neutral(name, value):
            return name, f"{name} {reason}."
    return None


def _reason_for_stray_field(body: type[RequestFields], name: str) -> str | None:
    if body not in _BODIES or name not in _KNOWN:
        return None
    owners = [path for other, path in _BODIES.items() if name in other.model_fields]
    return f"belongs to {', '.join(owners)}" if owners else "is not supported by this server"


def _is_neutral(name: str, value: Any) -> bool:
    """Whether the value asks for nothing. 0 is not false: `logprobs: 0` asks for the logprobs of the sampled tokens."""
    neutral = _NEUTRAL_VALUES.get(name, ())
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)
