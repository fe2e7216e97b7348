"""Writes the answer of Anthropic's API: as a stream of events, or whole at its end."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic_core import from_json

from engine.core.outputs import RequestOutput
from engine.core.request import FinishReason
from server.chat.blocks import Blocks, Event
from server.chat.output_reader import OutputReader
from server.chat.usage import ChatUsageCounter
from server.core.anthropic_errors import anthropic_error
from server.core.errors import ErrorKind
from server.generation.sse import typed_event
from server.tools.json_beginning import JsonBeginning
from server.tools.message_parts import Content, Part, Reasoning, ToolCall

PING = typed_event({"type": "ping"})


class _Block(ABC):
    def __init__(self, index: int) -> None:
        self._index = index

    def start(self) -> list[Event]:
        return [{"type": "content_block_start", "index": self._index, "content_block": self.whole()}]

    @abstractmethod
    def add(self, part: Part) -> list[Event]: ...

    def end(self, is_complete: bool) -> list[Event]:
        return [{"type": "content_block_stop", "index": self._index}]

    @abstractmethod
    def whole(self) -> dict[str, Any]: ...

    def _delta(self, delta: dict[str, str]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


class _TextBlock(_Block):
    """Text of the answer, or of the thinking before it: `name` is its type and its field, too."""

    def __init__(self, index: int, name: str, fields: Mapping[str, str]) -> None:
        super().__init__(index)
        self._name = name
        self._fields = fields
        self._text = ""

    def add(self, part: Part) -> list[Event]:
        assert isinstance(part, Content | Reasoning)
        self._text += part.text
        return [self._delta({"type": f"{self._name}_delta", self._name: part.text})]

    def whole(self) -> dict[str, Any]:
        return {"type": self._name, self._name: self._text, **self._fields}


class _OmittedThinking(_TextBlock):
    """Thinking that the answer does not tell: only that there was some."""

    def add(self, part: Part) -> list[Event]:
        return []


class _ToolUseBlock(_Block):
    def __init__(self, index: int, call: ToolCall) -> None:
        super().__init__(index)
        self._call = call
        self._arguments = ""
        self._beginning = JsonBeginning()
        self._is_broken = False

    def add(self, part: Part) -> list[Event]:
        assert isinstance(part, ToolCall)
        if not part.arguments:
            return []
        self._arguments += part.arguments
        # Anthropic's clients read what they have at each event, and give up the stream where it cannot become JSON.
        self._is_broken = self._is_broken or not self._beginning.add(part.arguments)
        if self._is_broken:
            return []
        return [self._delta({"type": "input_json_delta", "partial_json": part.arguments})]

    def whole(self) -> dict[str, Any]:
        return {"type": "tool_use", "id": self._call.id, "name": self._call.name, "input": self._input()}

    def _input(self) -> dict[str, Any]:
        """Returns the arguments as an object: an empty one until they are complete, and where they were cut off or are
        nothing that JSON can hold."""
        try:
            parsed = from_json(self._arguments)  # unlike json.loads, refuses endless nesting and lone surrogates
            json.dumps(parsed, allow_nan=False)
        except ValueError:
            return {}
        return parsed if isinstance(parsed, dict) else {}


def _make_block(shows_thinking: bool, index: int, part: Part) -> _Block:
    match part:
        case Content():
            return _TextBlock(index, "text", {})
        case Reasoning():
            block = _TextBlock if shows_thinking else _OmittedThinking
            return block(index, "thinking", {"signature": ""})
        case ToolCall():
            return _ToolUseBlock(index, part)


@dataclass(frozen=True, slots=True)
class MessageForm:
    """What is known of a message from its beginning on."""

    head: Mapping[str, Any]
    """The fields that do not depend on the answer."""
    shows_thinking: bool
    marks_cache: bool
    """Whether the request marks what is to be cached."""
    ends_with_context: bool
    """Whether the context has less room for the answer than the request allows."""


class MessageWriter:
    """Writes the message of one generation, given its outputs in their order."""

    def __init__(self, form: MessageForm, reader: OutputReader, counter: ChatUsageCounter, request_id: str) -> None:
        self._head = form.head
        self._marks_cache = form.marks_cache
        self._limit_reached = "model_context_window_exceeded" if form.ends_with_context else "max_tokens"
        self._reader = reader
        self._counter = counter
        self._request_id = request_id
        self._blocks: Blocks[_Block] = Blocks(partial(_make_block, form.shows_thinking))
        self._last: RequestOutput | None = None

    def begin(self) -> list[Event]:
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return [{"type": "message_start", "message": message}]

    def add(self, output: RequestOutput) -> list[Event]:
        self._last = output
        return [event for part in self._reader.read(output) for event in self._blocks.add(part)]

    def end(self) -> list[Event]:
        usage, timings = self._usage(), self._counter.timings()
        delta = {"type": "message_delta", "delta": self._stop(), "usage": usage, "timings": timings}
        return [*self._blocks.end(), delta, {"type": "message_stop"}]

    def fail(self, kind: ErrorKind, message: str) -> list[Event]:
        return [anthropic_error(kind.status, message, self._request_id)]

    def whole(self) -> dict[str, Any]:
        """Returns the whole message. To be called after the last output."""
        return {
            **self._head,
            "content": self._blocks.whole(),
            **self._stop(),
            "usage": self._usage(),
            "timings": self._counter.timings(),
        }

    def _stop(self) -> dict[str, str | None]:
        assert self._last is not None
        reason = self._last.stop_reason
        if self._last.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens" if reason else self._limit_reached, "stop_sequence": None}
        if isinstance(reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": reason}
        return {
            "stop_reason": "tool_use" if self._reader.has_called and not self._reader.is_cut else "end_turn",
            "stop_sequence": None,
        }

    def _usage(self) -> dict[str, int]:
        usage = self._counter.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        created = self._counter.num_cache_write_tokens if self._marks_cache else 0
        return {
            "input_tokens": usage["prompt_tokens"] - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }
