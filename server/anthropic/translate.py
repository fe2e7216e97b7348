"""A request of Anthropic's API -> the chat request that asks for the same."""

from collections.abc import Mapping
from typing import Any

from server.anthropic.tools import functions_of, tool_fields
from server.anthropic.turns import messages_of
from server.chat.translated import chat_request, given
from server.generation.error_renaming import ErrorRenaming
from server.protocol.anthropic import AnthropicConversation, MessagesRequest
from server.protocol.chat import ChatRequest

_EFFORTS: Mapping[str, str] = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Efforts, and those that templates know."""


def renaming_for(request: AnthropicConversation) -> ErrorRenaming:
    """Returns what gives errors of the chat request the names of this one. Tools that are left out count here."""
    places = list(functions_of(request))
    return ErrorRenaming(
        (r"tools\.(\d+)\.function\.parameters", lambda found: f"tools.{places[int(found[1])]}.input_schema"),
        (r"tools\.(\d+)\.function", lambda found: f"tools.{places[int(found[1])]}"),
        (r"tool_choice\.function", "tool_choice"),
        (r"response_format\.json_schema|response_format", "output_config.format"),
        ("thinking_token_budget", "thinking.budget_tokens"),
        ("max_completion_tokens", "max_tokens"),
        ("stop", "stop_sequences"),
        (r"messages\.\d+\.tool_calls[.\w]*", "messages: tool_use blocks of a turn"),
    )


def to_chat(request: AnthropicConversation) -> ChatRequest:
    """Returns the chat request. Raises ValidationError, with the names of the chat API, or BadRequestError."""
    thinking, schema = request.thinking, request.output_config.format
    fields = given(
        messages=messages_of(request),
        continue_final_message=True if request.messages[-1].role == "assistant" else None,
        thinking_token_budget=None if thinking is None else thinking.budget_tokens,
        chat_template_kwargs=_template_variables(request) | request.chat_template_kwargs,
        response_format=schema and {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema.schema_}},
    )
    if isinstance(request, MessagesRequest):
        fields |= {"max_tokens": request.max_tokens, "stop": request.stop_sequences, "stream": request.stream}
    return chat_request(request, fields | tool_fields(request))


def _template_variables(request: AnthropicConversation) -> dict[str, Any]:
    """Returns the template variables that turn thinking on or off, and say how much of it; templates of models without
    a choice ignore them."""
    variables: dict[str, Any] = {}
    if request.thinking is not None and request.thinking.type != "adaptive":
        variables["enable_thinking"] = request.thinking.type == "enabled"
    if request.output_config.effort is not None:
        variables["reasoning_effort"] = _EFFORTS[request.output_config.effort]
    return variables
