"""A chat client over HTTP: an answer as pieces of text while it is written, and what it took."""

import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from twostep.commands.endpoint import Endpoint, EndpointError

__all__ = ["NOT_UTF8", "Answer", "ChatClient", "Message"]

Message = dict[str, str]
NOT_UTF8 = "The text is not in UTF-8: iconv turns other encodings into it."

_TIMEOUT = httpx.Timeout(10, read=None)  # a first token may take minutes


@dataclass(slots=True)
class Answer:
    """An answer while it is read: iterate over `pieces` once, then the rest is filled in."""

    pieces: Iterator[tuple[bool, str]] = field(default_factory=lambda: iter(()))
    """Whether each piece is thinking, and its text."""
    text: str = ""
    """What was written so far, without thinking."""
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, Any] = field(default_factory=dict)
    """The server's own, if it tells them: see docs/api.md."""
    started_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    """Seconds to the first piece."""

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def summary(self) -> str:
        """Returns what the answer took, in one line."""
        prompt, generated = self.usage.get("prompt_tokens"), self.usage.get("completion_tokens")
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        decode_s = self.timings.get("decode_ms", 1e3 * (self._elapsed_s - (self.first_s or 0))) / 1e3
        parts = [] if prompt is None else [f"{prompt} prompt tokens" + (f", {cached} cached" if cached else "")]
        if self.first_s is not None:
            parts.append(f"first token {self.first_s:.2f} s" + _phases(self.timings))
        if generated:
            rate = f" at {(generated - 1) / decode_s:.1f}/s" if generated > 1 and decode_s > 0 else ""
            parts.append(f"{generated} tokens{rate}")
        if self.finish_reason == "length":
            parts.append("cut off by max_tokens or the context")
        return "; ".join(parts)


class ChatClient:
    """Asks one server, within its context."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Raises EndpointError for a URL that is none."""
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        self._url = endpoint.url
        try:
            self._client = httpx.Client(base_url=endpoint.url, headers=headers, timeout=_TIMEOUT)
        except httpx.InvalidURL as error:
            raise EndpointError(f"{endpoint.url} is no URL: {error}.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def first_model(self) -> str:
        """Returns the name of the first of the server's models. Raises EndpointError."""
        with self._errors():
            response = self._client.get("/v1/models")
            _check(response)
            for model in response.json()["data"]:
                return str(model["id"])
        raise EndpointError(f"{self._url} has no models.")

    @contextmanager
    def chat(self, messages: Sequence[Message], params: Mapping[str, Any]) -> Generator[Answer, None, None]:
        """Returns the answer in a conversation; leaving the context before its end ends it on the server, too. Raises
        EndpointError."""
        body = {"messages": list(messages), **params}
        with self._stream("/v1/chat/completions", body) as answer:
            yield answer

    @contextmanager
    def complete(self, prompt: str, params: Mapping[str, Any]) -> Generator[Answer, None, None]:
        """Returns what the model writes behind a text, as `chat` does."""
        with self._stream("/v1/completions", {"prompt": prompt, **params}) as answer:
            yield answer

    @contextmanager
    def _stream(self, path: str, body: Mapping[str, Any]) -> Generator[Answer, None, None]:
        answer = Answer()
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._errors(), self._client.stream("POST", path, json=body) as response:
            _check(response)
            answer.pieces = _pieces(response, answer)
            yield answer

    @contextmanager
    def _errors(self) -> Generator[None, None, None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise EndpointError(f"{self._url} cannot be asked: {error}. Is the server running?") from error
        except httpx.TransportError as error:
            raise EndpointError(f"{self._url} cannot be asked: {str(error) or type(error).__name__}.") from error
        except UnicodeEncodeError as error:
            raise EndpointError(NOT_UTF8) from error
        except (ValueError, KeyError, TypeError) as error:
            raise EndpointError(f"{self._url} does not answer as OpenAI's API does.") from error


def _pieces(response: httpx.Response, answer: Answer) -> Iterator[tuple[bool, str]]:
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip()
        if data in (line, "[DONE]"):
            continue
        event = json.loads(data)
        if "error" in event:
            raise EndpointError(str(event["error"]["message"]))
        answer.usage = event.get("usage") or answer.usage
        answer.timings = event.get("timings") or answer.timings
        for choice in event["choices"]:
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            for is_thinking, text in _texts(choice):
                answer.first_s = answer.first_s or time.monotonic() - answer.started_s
                answer.text += "" if is_thinking else text
                yield is_thinking, text


def _texts(choice: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    delta = choice.get("delta") or {}
    thinking = delta.get("reasoning_content") or delta.get("reasoning")
    if thinking:
        yield True, thinking
    if text := delta.get("content") or choice.get("text"):
        yield False, text


def _check(response: httpx.Response) -> None:
    """Raises EndpointError, with the server's own sentence, for anything but a success."""
    if response.is_success:
        return
    response.read()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"{response.url} answered {response.status_code} {response.reason_phrase}."
    raise EndpointError(str(message))


def _phases(timings: Mapping[str, Any]) -> str:
    if "queue_ms" not in timings or "prefill_ms" not in timings:
        return ""
    return f" (queue {timings['queue_ms'] / 1e3:.2f}, prefill {timings['prefill_ms'] / 1e3:.2f})"
