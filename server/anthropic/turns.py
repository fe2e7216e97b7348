"""The conversation of a request of Anthropic's API -> messages of a chat request."""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

from server.chat.translated import chat_call, given
from server.protocol.anthropic import AnthropicConversation
from server.protocol.anthropic_blocks import (
    AssistantBlock,
    AssistantTurn,
    BlocksSource,
    DocumentBlock,
    EarlierResultBlock,
    ReadBlock,
    SearchResultBlock,
    SystemTurn,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UserBlock,
    UserTurn,
)

_BILLING = "x-anthropic-billing-header:"
"""How the line begins that an agent puts first in its system prompt, for its vendor's accounting. It differs between
requests, so nothing behind it would ever be found in the prefix cache."""
_RESULT_FIELDS = ("title", "url", "source", "text", "data", "stdout", "stderr", "content")
"""Fields in which built-in tools return text; `data` of images is another matter."""
_RESULT_DEPTH = 8


def messages_of(request: AnthropicConversation) -> list[dict[str, Any]]:
    mute = _turns_without_thinking(request)
    turns = (_turn(turn, index in mute) for index, turn in enumerate(request.messages))
    return [*_system(request.system), *chain.from_iterable(turns)]


def _system(system: str | Sequence[TextBlock] | None) -> list[dict[str, Any]]:
    if isinstance(system, str):
        text = _without_billing(system)
        return [{"role": "system", "content": text}] if text or not system else []
    texts = [text for block in system or () if (text := _without_billing(block.text)) or not block.text]
    return [{"role": "system", "content": list(map(_part, texts))}] if texts else []


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def _turns_without_thinking(request: AnthropicConversation) -> Collection[int]:
    """Returns the indices of the assistant's messages whose thinking `context_management` clears. A turn of the
    assistant has all its messages between two of the user, where results of calls are no end of it."""
    kept = None if request.context_management is None else request.context_management.num_thinking_turns
    if kept is None:
        return ()
    turn, thinking = 0, dict[int, int]()
    for index, message in enumerate(request.messages):
        if isinstance(message, AssistantTurn) and _thoughts(message):
            thinking[index] = turn
        elif isinstance(message, UserTurn) and not _has_only_results(message):
            turn += 1
    newest = sorted(set(thinking.values()))[-kept:]
    return [index for index, turn in thinking.items() if turn not in newest]


def _has_only_results(turn: UserTurn) -> bool:
    return isinstance(turn.content, list) and all(isinstance(block, ToolResultBlock) for block in turn.content)


def _thoughts(turn: AssistantTurn) -> list[str]:
    blocks = turn.content if isinstance(turn.content, list) else []
    return [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]


def _turn(turn: Turn, is_mute: bool) -> list[dict[str, Any]]:
    match turn:
        case UserTurn(content=list(blocks)):
            return _user(blocks)
        case AssistantTurn(content=list(blocks)):
            return [_assistant(blocks, [] if is_mute else _thoughts(turn))]
        case SystemTurn():
            return [{"role": "system", "content": _content(turn.content)}]
        case _:
            return [{"role": turn.role, "content": turn.content}]


def _user(blocks: Sequence[UserBlock]) -> list[dict[str, Any]]:
    """Returns a user turn's messages: the results of calls are messages of their own, and so is text between them."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            messages.append(_result(block))
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"].append(_part(_text(block)))
        else:
            messages.append({"role": "user", "content": [_part(_text(block))]})
    return messages


def _result(block: ToolResultBlock) -> dict[str, Any]:
    content = _content(block.content)
    if block.is_error:
        content = f"Error: {content}" if isinstance(content, str) else [_part("Error:"), *content]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _assistant(blocks: Sequence[AssistantBlock], thoughts: Sequence[str]) -> dict[str, Any]:
    texts = chain.from_iterable(map(_said, blocks))
    return {
        "role": "assistant",
        "content": list(map(_part, texts)) or "",
        **given(
            reasoning_content="\n".join(thoughts) or None,
            tool_calls=[chat_call(each.id, each.name, each.input) for each in blocks if isinstance(each, ToolUseBlock)],
        ),
    }


def _said(block: AssistantBlock) -> list[str]:
    match block:
        case TextBlock(text=text):
            return [text]
        case EarlierResultBlock(content=content):
            return ["\n".join(found)] if (found := list(_texts_in(content, _RESULT_DEPTH))) else []
        case _:
            return []


def _texts_in(value: Any, depth: int) -> Iterator[str]:
    """Yields what is text in the result of a built-in tool: not what is encrypted, nor images."""
    match value:
        case str() if value:
            yield value
        case list() if depth:
            yield from chain.from_iterable(_texts_in(each, depth - 1) for each in value)
        case dict() if depth and value.get("type") != "base64":
            yield from chain.from_iterable(_texts_in(value.get(name), depth - 1) for name in _RESULT_FIELDS)


def _content(content: str | Sequence[ReadBlock]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [_part(_text(block)) for block in content]


def _text(block: ReadBlock) -> str:
    match block:
        case TextBlock(text=text):
            return text
        case ToolReferenceBlock(tool_name=name):
            return name
        case SearchResultBlock(title=title, source=source, content=content):
            return "\n".join([title, source, *map(_text, content)])
        case DocumentBlock(title=title, context=context, source=source):
            return "\n".join([*filter(None, (title, context)), *_source(source)])


def _source(source: TextSource | BlocksSource) -> list[str]:
    if isinstance(source, TextSource):
        return [source.data]
    return [source.content] if isinstance(source.content, str) else list(map(_text, source.content))


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
