"""The events of a stream as each endpoint sends them, and what its requests ask for."""

from typing import Any

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
Body = dict[str, Any]


def num_asked(body: Body) -> int:
    """Returns how many tokens a request asks for."""
    found: int = body.get("max_tokens") or body["max_output_tokens"]
    return found


def num_prompt_tokens(body: Body) -> int:
    """Returns the prompt's tokens: ids, or words of everything that is said in the messages."""
    if isinstance(prompt := body.get("prompt"), list):
        return len(prompt)
    said = [prompt] if prompt else [item.get("content") for item in body.get("messages") or body.get("input") or []]
    return sum(len(str(text).split()) for text in said if text)


def first(path: str) -> list[Body]:
    """Returns the events before the first token."""
    if path == "/v1/chat/completions":
        return [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}]
    if path == "/v1/responses":
        return [{"type": "response.created", "response": {"error": None, "usage": None}}]
    return []


def token(path: str, text: str, finish_reason: str | None) -> Body:
    """Returns the event of a token."""
    if path == "/v1/responses":
        return {"type": "response.output_text.delta", "delta": text}
    said: Body = {"delta": {"content": text}} if path == "/v1/chat/completions" else {"text": text}
    return {"choices": [{"index": 0, **said, "finish_reason": finish_reason}]}


def call(path: str, arguments: str) -> Body:
    """Returns the event of a call of a tool."""
    if path == "/v1/responses":
        return {"type": "response.function_call_arguments.delta", "delta": arguments}
    part = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"choices": [{"index": 0, "delta": {"tool_calls": [part]}, "finish_reason": None}]}


def output(text: str, arguments: str | None) -> list[Body]:
    """Returns the items of a response."""
    items: list[Body] = [{"type": "message", "content": [{"type": "output_text", "text": text}]}]
    if arguments is not None:
        items.append({"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments})
    return items


def usage(path: str, num_prompt: int, num_completion: int, num_cached: int, **more: Any) -> Body:
    """Returns the event that carries the usage; of a response it has what else is known, too."""
    if path == "/v1/responses":
        details = {"input_tokens_details": {"cached_tokens": num_cached}}
        counts = {"input_tokens": num_prompt, "output_tokens": num_completion, **details}
        return {"type": "response.completed", "response": {"error": None, "usage": counts, **more}}
    details = {"prompt_tokens_details": {"cached_tokens": num_cached}}
    return {"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_completion, **details}}
