"""The endpoints that can be measured: their paths, what a request to each says, and how its stream is read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from loadtest.collector import ChatCollector, ResponsesCollector, StreamCollector
from loadtest.workload import Conversation, Message, Prompt, RequestSpec


class Endpoint(StrEnum):
    """Choices of `--endpoint`."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"


PATHS: Mapping[Endpoint, str] = {
    Endpoint.COMPLETIONS: "/v1/completions",
    Endpoint.CHAT: "/v1/chat/completions",
    Endpoint.RESPONSES: "/v1/responses",
}
COLLECTORS: Mapping[Endpoint, type[StreamCollector]] = {
    Endpoint.COMPLETIONS: StreamCollector,
    Endpoint.CHAT: ChatCollector,
    Endpoint.RESPONSES: ResponsesCollector,
}


@dataclass(frozen=True)
class WireOptions:
    """Options that all requests of a run have in common."""

    model: str = ""
    endpoint: Endpoint = Endpoint.COMPLETIONS
    api_key: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)
    temperature: float = 0.0
    ignore_eos: bool = True
    include_usage: bool = True
    expects_done: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    retry_429: bool = False

    def request_headers(self) -> dict[str, str]:
        """Returns the Authorization header and the user's own headers, with names in lower case."""
        authorization = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {**authorization, **self.headers}


def request_body(options: WireOptions, spec: RequestSpec) -> dict[str, Any]:
    """Returns the JSON body of a request. A responses server always tells the usage and, asked by `store`, keeps
    nothing."""
    body: dict[str, Any] = {"model": options.model, **_asked(options.endpoint, spec)}
    body |= {"temperature": options.temperature, "stream": True}
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.endpoint is Endpoint.RESPONSES:
        body["store"] = False
    elif options.include_usage:
        body["stream_options"] = {"include_usage": True}
    return {**body, **options.extra_body}


def _asked(endpoint: Endpoint, spec: RequestSpec) -> dict[str, Any]:
    if endpoint is Endpoint.COMPLETIONS:
        return {"prompt": spec.prompt, "max_tokens": spec.max_tokens}
    told = _conversation(spec.prompt)
    if endpoint is Endpoint.CHAT:
        tools = {"tools": told.tools} if told.tools else {}
        return {"messages": told.messages, **tools, "max_tokens": spec.max_tokens}
    flat = tuple({"type": "function", **tool["function"]} for tool in told.tools)
    items = [item for message in told.messages for item in _items(message)]
    return {"input": items, **({"tools": flat} if flat else {}), "max_output_tokens": spec.max_tokens}


def _conversation(prompt: Prompt) -> Conversation:
    return prompt if isinstance(prompt, Conversation) else Conversation(({"role": "user", "content": prompt},))


def _items(message: Message) -> Iterator[dict[str, Any]]:
    """Yields the items of a response's input that say what a chat's message says."""
    if message["role"] == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
        return
    if message.get("content"):
        yield {"role": message["role"], "content": message["content"]}
    for call in message.get("tool_calls") or ():
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}
