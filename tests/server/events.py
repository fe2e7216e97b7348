"""Reading responses in tests: bodies, event streams, errors."""

import json
from typing import Any

import httpx


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Returns the events of a complete stream, which must end with [DONE]. On a slow machine there are keep-alive
    comments between them."""
    assert response.status_code == 200, response.text
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events if event != ": keep-alive"]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """Returns the concatenated text of one choice."""
    return "".join(each["text"] for chunk in chunks for each in chunk.get("choices", ()) if each["index"] == index)


def deltas_of(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """Returns the deltas of one choice of a chat."""
    return [each["delta"] for chunk in chunks for each in chunk.get("choices", ()) if each["index"] == index]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Returns the error, which must have all its fields."""
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["code"], str)
    error: dict[str, Any] = body["error"]
    return error


def typed_events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Returns the events of a stream that names them by their type."""
    assert response.status_code == 200, response.text
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    parsed = [json.loads(event.partition("\ndata: ")[2]) for event in events]
    assert [event.partition("\n")[0] for event in events] == [f"event: {event['type']}" for event in parsed]
    return parsed


def json_lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Returns the lines of a stream of lines of JSON."""
    assert response.status_code == 200, response.text
    *lines, rest = response.text.split("\n")
    assert rest == ""
    return [json.loads(line) for line in lines]


def timeless(value: Any) -> Any:
    """Returns an answer, or its events, without times and what takes time."""
    if isinstance(value, dict):
        return {name: timeless(each) for name, each in value.items() if name not in _TIMES}
    return [timeless(each) for each in value] if isinstance(value, list) else value


_DURATIONS = frozenset({"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"})
_TIMES = _DURATIONS | {"timings", "created_at", "completed_at"}


def anthropic_error_of(response: httpx.Response) -> dict[str, Any]:
    """Returns the error in Anthropic's form, which must have all its fields."""
    body = response.json()
    assert set(body) == {"type", "error", "request_id"} and set(body["error"]) == {"type", "message"}
    assert body["type"] == "error" and body["request_id"] == response.headers["request-id"]
    error: dict[str, Any] = body["error"]
    return error


def first(body: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = body["choices"][0]
    return choice
