"""The forms that a record of a file may have, and the request that each means. A record that makes no sense raises
ValueError with a phrase that says why.

    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}       ShareGPT
    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}    Mooncake's traces
    {"prompt": "..." | "messages": [...], "max_tokens": 100, "arrival_s": 1.5}                    one request
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from loadtest.datasets.entries import TRACE_BLOCK_TOKENS, Entry, TracedPrompt
from loadtest.endpoints import Endpoint
from loadtest.workload import Conversation

MAX_CHARACTERS = 4_000_000  # of a prompt
MAX_TOKENS = 2_000_000  # of a prompt, and of an answer
_CHARACTERS_PER_TOKEN = 4  # of answers in ShareGPT's form, which have no token counts: an estimate
_TRACE_FIELDS = {"timestamp", "input_length", "output_length", "hash_ids"}
_REQUEST_FIELDS = {"id", "prompt", "messages", "tools", "max_tokens", "arrival_s"}
_ASKING, _ANSWERING = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard")  # ShareGPT's names
_ROLES = ("system", "developer", "user", "assistant", "tool")

Record = Mapping[str, Any]


def entry_of(record: Any, endpoint: Endpoint) -> Entry | None:
    """Returns the request of a record; None for a conversation that has none."""
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    if "conversations" in record:
        return _of_conversation(record, endpoint)
    if "input_length" in record:
        return _of_trace(record)
    if "prompt" in record or "messages" in record:
        return _of_request(record, endpoint)
    raise ValueError("it has none of conversations, input_length, prompt and messages")


def _of_conversation(record: Record, endpoint: Endpoint) -> Entry | None:
    """Takes the first question that has an answer; the system message before it where chats or responses are sent."""
    turns = record["conversations"]
    if not isinstance(turns, list):
        raise ValueError("conversations is not a list")
    spoken = [(_text(turn, "from"), _text(turn, "value")) for turn in turns]
    for (who, question), (next_who, answer) in pairwise(spoken):
        if who in _ASKING and next_who in _ANSWERING and question and answer:
            system = [text for name, text in spoken[:1] if name == "system"]
            max_tokens = max(1, math.ceil(len(answer) / _CHARACTERS_PER_TOKEN))
            if endpoint is Endpoint.COMPLETIONS or not system:
                return Entry(question, max_tokens)
            return Entry(Conversation((_message("system", system[0]), _message("user", question))), max_tokens)
    return None


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _text(record: Any, name: str) -> str:
    text = record.get(name) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{name} is not a string")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{name} has more than {MAX_CHARACTERS:,} characters")
    return text


def _of_trace(record: Record) -> Entry:
    _refuse_others(record, _TRACE_FIELDS)
    num_tokens = _whole(record, "input_length")
    block_ids = record.get("hash_ids") or []
    if not (isinstance(block_ids, list) and all(isinstance(block_id, int) for block_id in block_ids)):
        raise ValueError("hash_ids is not a list of whole numbers")
    if block_ids and len(block_ids) != math.ceil(num_tokens / TRACE_BLOCK_TOKENS):
        raise ValueError(
            f"{len(block_ids)} hash_ids, of {TRACE_BLOCK_TOKENS} tokens each, are not those of {num_tokens} tokens"
        )
    arrival_s = _time(record, "timestamp")
    return Entry(
        TracedPrompt(num_tokens, tuple(block_ids)),
        _whole(record, "output_length") if "output_length" in record else None,
        None if arrival_s is None else arrival_s / 1000,
    )


def _of_request(record: Record, endpoint: Endpoint) -> Entry:
    _refuse_others(record, _REQUEST_FIELDS)
    if "prompt" in record and ("messages" in record or "tools" in record):
        raise ValueError("a prompt goes neither with messages nor with tools")
    max_tokens = _whole(record, "max_tokens") if "max_tokens" in record else None
    arrival_s = _time(record, "arrival_s")
    if "prompt" in record:
        return Entry(_text(record, "prompt"), max_tokens, arrival_s)
    if endpoint is Endpoint.COMPLETIONS:
        raise ValueError("it has messages, which are sent with --endpoint chat or responses")
    return Entry(Conversation(_messages(record["messages"]), _tools(record.get("tools", []))), max_tokens, arrival_s)


def _refuse_others(record: Record, known: set[str]) -> None:
    if unknown := sorted(record.keys() - known):
        raise ValueError(f"{unknown[0]!r} is not known here (known: {', '.join(sorted(known))})")


def _whole(record: Record, name: str) -> int:
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        raise ValueError(f"{name} is not a whole number from 1 to {MAX_TOKENS:,}")
    return value


def _time(record: Record, name: str) -> float | None:
    if name not in record:
        return None
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise ValueError(f"{name} is not a number from 0 up")
    return float(value)


def _messages(messages: Any) -> tuple[Record, ...]:
    if not (isinstance(messages, list) and messages):
        raise ValueError("messages is not a list with a message")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ValueError(f"a message has no role of {', '.join(_ROLES)}")
        if not (message.get("content") is None and message.get("tool_calls")):
            _text(message, "content")
        if message["role"] == "tool":
            _text(message, "tool_call_id")
        for call in message.get("tool_calls") or []:
            _text(call, "id")
            _text(call.get("function"), "name")
            _text(call.get("function"), "arguments")
    return tuple(messages)


def _tools(tools: Any) -> tuple[Record, ...]:
    if not isinstance(tools, list):
        raise ValueError("tools is not a list")
    for tool in tools:
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise ValueError("a tool is not of type function")
        _text(tool.get("function"), "name")
    return tuple(tools)
