"""A request of Anthropic's API -> the chat request that asks for the same."""

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

from server.chat.translated import chat_request, given
from server.generation.error_renaming import ErrorRenaming
from server.protocol.anthropic import (
    AnthropicConversation,
    AnthropicTool,
    AnthropicToolChoice,
    MessagesRequest,
    ToolByName,
)
from server.protocol.anthropic_blocks import (
    AssistantBlock,
    AssistantTurn,
    SystemTurn,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UserBlock,
    UserTurn,
)
from server.protocol.chat import ChatRequest

RENAMING = ErrorRenaming(
    (r"tools\.(\d+)\.function\.parameters", r"tools.\1.input_schema"),
    (r"tools\.(\d+)\.function", r"tools.\1"),
    (r"tool_choice\.function", "tool_choice"),
    (r"response_format\.json_schema|response_format", "output_config.format"),
    ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    ("thinking_token_budget", "thinking.budget_tokens"),
    ("max_completion_tokens", "max_tokens"),
    ("stop", "stop_sequences"),
    (r"messages\.\d+\.tool_calls[.\w]*", "messages: tool_use blocks of a turn"),
)


def to_chat(request: AnthropicConversation) -> ChatRequest:
    """Returns the chat request. Raises ValidationError, with the names of the chat API."""
    choice, thinking = request.tool_choice, request.thinking
    schema = request.output_config.format
    fields = given(
        messages=_messages(request),
        continue_final_message=True if request.messages[-1].role == "assistant" else None,
        tools=[_tool(tool) for tool in request.tools],
        tool_choice=_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        thinking_token_budget=None if thinking is None else thinking.budget_tokens,
        chat_template_kwargs=_thinking_switch(request) | request.chat_template_kwargs,
        response_format=schema and {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema.schema_}},
    )
    if isinstance(request, MessagesRequest):
        fields |= {"max_tokens": request.max_tokens, "stop": request.stop_sequences, "stream": request.stream}
    return chat_request(request, fields)


def _thinking_switch(request: AnthropicConversation) -> dict[str, bool]:
    """Returns the template variable that turns thinking on or off; templates of models without a choice ignore it."""
    match request.thinking:
        case None:
            return {}
        case thinking if thinking.type == "adaptive":
            return {}
        case thinking:
            return {"enable_thinking": thinking.type == "enabled"}


def _messages(request: AnthropicConversation) -> list[dict[str, Any]]:
    system = [] if request.system in (None, []) else [{"role": "system", "content": _text(request.system)}]
    return [*system, *chain.from_iterable(map(_turn, request.messages))]


def _turn(turn: Turn) -> list[dict[str, Any]]:
    match turn:
        case UserTurn(content=list(blocks)):
            return _user(blocks)
        case AssistantTurn(content=list(blocks)):
            return [_assistant(blocks)]
        case SystemTurn():
            return [{"role": "system", "content": _text(turn.content)}]
        case _:
            return [{"role": turn.role, "content": turn.content}]


def _user(blocks: Sequence[UserBlock]) -> list[dict[str, Any]]:
    """Returns a user turn's messages: the results of calls are messages of their own, and so is text between them."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            messages.append(_result(block))
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"].append(_part(block))
        else:
            messages.append({"role": "user", "content": [_part(block)]})
    return messages


def _result(block: ToolResultBlock) -> dict[str, Any]:
    content = _text(block.content)
    if block.is_error:
        content = f"Error: {content}" if isinstance(content, str) else [{"type": "text", "text": "Error:"}, *content]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _assistant(blocks: Sequence[AssistantBlock]) -> dict[str, Any]:
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return {
        "role": "assistant",
        "content": [_part(block) for block in blocks if isinstance(block, TextBlock)] or "",
        **given(
            reasoning_content="\n".join(thoughts) or None,
            tool_calls=[_call(block) for block in blocks if isinstance(block, ToolUseBlock)],
        ),
    }


def _text(content: str | Sequence[TextBlock]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [_part(block) for block in content]


def _part(block: TextBlock) -> dict[str, Any]:
    return {"type": "text", "text": block.text}


def _call(block: ToolUseBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = given(name=tool.name, description=tool.description, strict=tool.strict)
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


def _choice(choice: AnthropicToolChoice | None) -> Any:
    if isinstance(choice, ToolByName):
        return {"type": "function", "function": {"name": choice.name}}
    return None if choice is None else {"auto": None, "any": "required", "none": "none"}[choice.type]
