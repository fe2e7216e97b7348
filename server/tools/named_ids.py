"""Ids of calls that name their function, as `functions.get_weather:0`, for templates that write ids and no names."""

from collections.abc import Iterable
from itertools import count
from typing import Any


def with_named_ids(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the conversation with the ids of calls, and of their results, as Kimi K2 was trained on them: a name, and
    the number of the call in the conversation."""
    numbers, ids, renamed = count(), dict[str, str](), []
    for message in messages:
        if message.get("tool_calls"):
            calls = [call | {"id": _named_id(call, next(numbers))} for call in message["tool_calls"]]
            ids |= {old["id"]: new["id"] for old, new in zip(message["tool_calls"], calls, strict=True)}
            message = message | {"tool_calls": calls}
        elif message.get("tool_call_id") in ids:
            message = message | {"tool_call_id": ids[message["tool_call_id"]]}
        renamed.append(message)
    return renamed


def _named_id(call: dict[str, Any], number: int) -> str:
    return f"functions.{call['function']['name']}:{number}"
