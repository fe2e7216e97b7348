"""Parses the data of a stream's events: arrivals of tokens, usage, the server's timings, errors.

A collector for each endpoint: they differ in which events carry a token, and in what ends a stream.
"""

import json
from array import array
from collections.abc import Sequence
from math import isfinite
from typing import Any

from loadtest.record import Outcome, Usage
from loadtest.sessions.answer import Answer, ChatAnswer, answer_of_items

_TOKEN_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")  # of a chat's delta

# Keys of twostep's `timings` object that are read; `timings` objects of other servers have other keys.
SERVER_TIMINGS = (
    "queue_ms",
    "prefill_ms",
    "ttft_ms",
    "decode_ms",
    "itl_ms",
    "itl_p99_ms",
    "e2e_ms",
    "generated_tokens",
)


class StreamCollector:
    """Collects one stream of /v1/completions. `on_event` is the hot path: it runs once per token, inside the socket's
    callback."""

    end_mark = "[DONE]"  # what the last event says

    def __init__(self, expects_done: bool = True, keeps_answer: bool = False) -> None:
        self._expects_done = expects_done
        self._keeps_answer = keeps_answer
        self.usage: Usage | None = None
        self.server_ms: dict[str, float] = {}
        self._arrivals_s = array("d")
        self._is_done = False
        self._ends_without_token = False
        self._failure: tuple[Outcome, str] | None = None

    def on_event(self, data: bytes, now_s: float) -> None:
        """Takes one event, whose last byte was read at `now_s`. Events after a failure are ignored."""
        if self._failure is not None:
            return
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            chunk = json.loads(data.decode())  # decoded here: loads would guess the encoding first
        except ValueError:
            self._failure = (Outcome.BROKEN, f"an event is not JSON: {data[:80]!r}")
            return
        if not isinstance(chunk, dict):
            self._failure = (Outcome.BROKEN, f"an event is not a JSON object: {data[:80]!r}")
        elif chunk.get("error"):
            self._failure = (Outcome.STREAM_ERROR, error_message(chunk))
        else:
            try:
                self._on_chunk(chunk, now_s)
            except (AttributeError, TypeError, ValueError, LookupError):
                self._failure = (Outcome.BROKEN, f"an event has an unexpected shape: {data[:200]!r}")

    def _on_chunk(self, chunk: dict[str, Any], now_s: float) -> None:
        if choices := chunk.get("choices"):
            self._arrivals_s.append(now_s)
            choice = choices[0]
            self._ends_without_token = bool(choice.get("finish_reason")) and not choice.get("text")
        self._on_counts(chunk)

    def _on_counts(self, body: dict[str, Any]) -> None:
        if usage := body.get("usage"):
            self.usage = _parse_usage(usage)
        if timings := body.get("timings"):
            self.server_ms.update(_numbers(timings))

    @property
    def arrivals_s(self) -> Sequence[float]:
        """Arrival times of tokens. Some servers end with an empty chunk that carries only the finish reason: there is
        then one chunk more than tokens in `usage`, and it does not count as an arrival."""
        if self.usage and self._ends_without_token and len(self._arrivals_s) > self.usage.completion_tokens:
            return self._arrivals_s[:-1]
        return self._arrivals_s

    def answer(self) -> Answer:
        """Returns the answer of an OK stream if it was to be kept, else an empty one."""
        return Answer()

    @property
    def has_failed(self) -> bool:
        """Whether an event was invalid or reported an error, whatever the rest of the response looks like."""
        return self._failure is not None

    def verdict(self) -> tuple[Outcome, str]:
        """Returns the outcome of the stream, and the reason if it is not OK. Call after the body's end."""
        if self._failure is not None:
            return self._failure
        if self._expects_done and not self._is_done:
            return Outcome.BROKEN, f"the stream ended without {self.end_mark}"
        if not self._has_answer:
            return Outcome.BROKEN, "the stream carried no token"
        return Outcome.OK, ""

    @property
    def _has_answer(self) -> bool:
        return bool(self._arrivals_s) or (self.usage is not None and self.usage.completion_tokens == 0)


class ChatCollector(StreamCollector):
    """Collects one stream of /v1/chat/completions. A chunk without text, thinking or a call is no arrival: it names the
    role or the finish reason. An answer may have no text at all."""

    def __init__(self, expects_done: bool = True, keeps_answer: bool = False) -> None:
        super().__init__(expects_done, keeps_answer)
        self._is_answered = False
        self._answer = ChatAnswer()

    def answer(self) -> Answer:
        return self._answer.whole()

    def _on_chunk(self, chunk: dict[str, Any], now_s: float) -> None:
        if choices := chunk.get("choices"):
            self._is_answered = True
            delta = choices[0].get("delta") or {}
            if any(delta.get(name) for name in _TOKEN_FIELDS):
                self._arrivals_s.append(now_s)
                if self._keeps_answer:
                    self._answer.add(delta)
        self._on_counts(chunk)

    @property
    def _has_answer(self) -> bool:
        return self._is_answered


class ResponsesCollector(StreamCollector):
    """Collects one stream of /v1/responses: an arrival is an event that carries a delta, and the last one has the
    usage."""

    end_mark = "response.completed"
    _answer = Answer()

    def answer(self) -> Answer:
        return self._answer

    def on_event(self, data: bytes, now_s: float) -> None:
        if data != b"[DONE]":  # some servers send it after the last event, which alone says that the answer is whole
            super().on_event(data, now_s)

    def _on_chunk(self, chunk: dict[str, Any], now_s: float) -> None:
        kind = chunk["type"]
        if kind.endswith(".delta"):
            if chunk["delta"]:
                self._arrivals_s.append(now_s)
        elif kind in ("response.completed", "response.incomplete"):
            self._is_done = True
            self._on_counts(chunk["response"])
            if self._keeps_answer:
                self._answer = answer_of_items(chunk["response"]["output"])
        elif kind in ("response.failed", "error"):
            self._failure = (Outcome.STREAM_ERROR, error_message(chunk.get("response") or chunk))

    @property
    def _has_answer(self) -> bool:
        return True  # the last event says so


def error_message(body: Any) -> str:
    """Returns the message in an OpenAI error body, or the text of any other; one line of at most 300 characters."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:300]


def _parse_usage(usage: dict[str, Any]) -> Usage:
    """Returns the counts of a `usage`, whose names are other ones in /v1/responses."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return Usage(
        prompt_tokens=int(usage.get("prompt_tokens") or usage.get("input_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or usage.get("output_tokens") or 0),
        cached_prompt_tokens=int(details.get("cached_tokens") or 0),
    )


def _numbers(timings: dict[str, Any]) -> dict[str, float]:
    known = {name: timings.get(name) for name in SERVER_TIMINGS}
    return {name: float(value) for name, value in known.items() if isinstance(value, int | float) and isfinite(value)}
