"""Streams of Responses, Messages and Ollama's API for soak runs: text, tools and log-probabilities, compared event by
event."""

import uuid
from dataclasses import dataclass
from typing import Any

import httpx

from server.routing.continuation import LINE_PATHS
from tests.server.events import json_lines_of, timeless, typed_events_of
from tests.soak.kills import PROMPTS

_CITY = {"type": "object", "properties": {"city": {"type": "string"}, "note": {"type": "string"}}, "required": ["city"]}
_CITIES = {"type": "array", "items": _CITY, "minItems": 8}
_FUNCTION = {"type": "function", "name": "f", "parameters": _CITY, "strict": False}
_CHAT_FUNCTION = {"type": "function", "function": {"name": "f", "description": "tells", "parameters": _CITY}}
_KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/responses", {}),
    ("/v1/messages", {"temperature": 0}),
    ("/v1/responses", {"temperature": 0.9, "presence_penalty": 0.5}),
    ("/v1/messages", {"stop_sequences": ["return"]}),
    ("/v1/responses", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ("/v1/messages", {"tools": [{"name": "f", "input_schema": _CITY}], "tool_choice": {"type": "any"}}),
    ("/v1/responses", {"tools": [_FUNCTION], "tool_choice": "required"}),
    ("/api/chat", {}),
    ("/api/generate", {"raw": True}),
    ("/api/chat", {"format": _CITIES}),
    ("/api/generate", {"format": _CITIES}),
    ("/api/chat", {"tools": [_CHAT_FUNCTION]}),
)


@dataclass(frozen=True)
class TypedAnswer:
    """All events of a stream, without their times."""

    events: list[dict[str, Any]]
    num_tokens: int


def typed_body_of(index: int, max_tokens: int) -> dict[str, Any]:
    """Returns a request, with its path as `path`."""
    path, fields = _KINDS[index % len(_KINDS)]
    asks = f"{index}: {PROMPTS[index % len(PROMPTS)]} " * (1 + index % 6 + 10 * (index % 4 == 0))
    if path in LINE_PATHS:
        options = {"num_predict": max_tokens - index % 17, "seed": index}
        asked = {"prompt": asks} if path == "/api/generate" else {"messages": [{"role": "user", "content": asks}]}
        return {"path": path, "options": options, **asked, **fields}
    body = {"path": path, "seed": index, "stream": True, "ignore_eos": not fields.get("tools"), **fields}
    if path == "/v1/messages":
        return body | {"messages": [{"role": "user", "content": asks}], "max_tokens": max_tokens - index % 17}
    return body | {"input": asks, "max_output_tokens": max_tokens - index % 17}


async def typed_stream(client: httpx.AsyncClient, body: dict[str, Any]) -> TypedAnswer:
    """Runs a stream to its end, under an id that is always the same and without a cached prefix, so that equal events
    are due. Raises AssertionError if it is not complete."""
    path = body["path"]
    sent = {name: value for name, value in body.items() if name != "path"} | {"cache_salt": uuid.uuid4().hex}
    headers = {"X-Request-Id": f"soak-{body.get('seed', 'lines')}"}
    response = await client.post(path, json=sent, headers=headers)
    if path in LINE_PATHS:
        lines: list[dict[str, Any]] = timeless(json_lines_of(response))
        assert lines[-1].get("done"), f"ends with {lines[-1]}"
        return TypedAnswer(lines, lines[-1]["eval_count"])
    events: list[dict[str, Any]] = timeless(typed_events_of(response))
    assert events[-1]["type"] in ("message_stop", "response.completed", "response.incomplete"), (
        f"ends with {events[-1]}"
    )
    usage = events[-2]["usage"] if path == "/v1/messages" else events[-1]["response"]["usage"]
    return TypedAnswer(events, usage["output_tokens"])
