"""Writes the answer of Ollama's API: as lines of JSON, or whole at its end."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic_core import from_json

from engine.core.outputs import RequestOutput
from engine.core.request import FinishReason
from server.chat.blocks import Blocks, Event
from server.chat.output_reader import OutputReader
from server.core.errors import ErrorKind
from server.generation.typed_stream import TypedStream
from server.generation.usage import UsageCounter
from server.tools.message_parts import Content, Part, Reasoning, ToolCall


class _TextBlock:
    """Text of the answer, or of the thinking before it; `name` is its field."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._text = ""

    def start(self) -> list[Event]:
        return []

    def add(self, part: Part) -> list[Event]:
        assert isinstance(part, Content | Reasoning)
        self._text += part.text
        return [{self._name: part.text}]

    def end(self, is_complete: bool) -> list[Event]:
        return []

    def whole(self) -> dict[str, Any]:
        return {self._name: self._text}


class _CallBlock:
    """A call, which is told when it is complete: its arguments are an object here. One that was cut off, or whose
    arguments are none, is told as text, so that nobody takes it for a call and nothing is lost."""

    def __init__(self, call: ToolCall) -> None:
        self._call = call
        self._arguments = ""

    def start(self) -> list[Event]:
        return []

    def add(self, part: Part) -> list[Event]:
        assert isinstance(part, ToolCall)
        self._arguments += part.arguments
        return []

    def end(self, is_complete: bool) -> list[Event]:
        return [self.whole()]

    def whole(self) -> dict[str, Any]:
        arguments = _object(self._arguments)
        if arguments is None:
            return {"content": f'{{"name": {json.dumps(self._call.name)}, "arguments": {self._arguments}'}
        function = {"index": self._call.index, "name": self._call.name, "arguments": arguments}
        return {"tool_calls": [{"id": self._call.id, "function": function}]}


def _object(arguments: str) -> dict[str, Any] | None:
    """Returns the object that is written; None if there is none that JSON can hold."""
    try:
        parsed = from_json(arguments)  # unlike json.loads, refuses endless nesting and lone surrogates
        json.dumps(parsed, allow_nan=False)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _make_block(_: int, part: Part) -> _TextBlock | _CallBlock:
    match part:
        case Content():
            return _TextBlock("content")
        case Reasoning():
            return _TextBlock("thinking")
        case ToolCall():
            return _CallBlock(part)


def message_body(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a line of /api/chat has of the answer."""
    return {"message": {"role": "assistant", "content": "", **fields}}


def response_body(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a line of /api/generate has of the answer."""
    rest = {name: value for name, value in fields.items() if name != "content"}
    return {"response": fields.get("content", ""), **rest}


class LineWriter:
    """Writes the answer of one generation, given its outputs in their order."""

    def __init__(self, head: Mapping[str, Any], is_chat: bool, reader: OutputReader, counter: UsageCounter) -> None:
        """`head` has the fields that all lines begin with."""
        self._head = head
        self._body = message_body if is_chat else response_body
        self._reader = reader
        self._counter = counter
        self._blocks: Blocks[_TextBlock | _CallBlock] = Blocks(_make_block)
        self._last: RequestOutput | None = None

    def begin(self) -> list[Event]:
        return []

    def add(self, output: RequestOutput) -> list[Event]:
        self._last = output
        return self._lines([event for part in self._reader.read(output) for event in self._blocks.add(part)])

    def end(self) -> list[Event]:
        return [*self._lines(self._blocks.end()), {**self._head, **self._body({}), **self._ending()}]

    def fail(self, kind: ErrorKind, message: str) -> list[Event]:
        return [{"error": message}]

    def whole(self) -> dict[str, Any]:
        """Returns the whole answer. To be called after the last output."""
        fields: dict[str, Any] = {}
        for block in self._blocks.whole():
            for name, value in block.items():
                fields[name] = fields[name] + value if name in fields else value
        return {**self._head, **self._body(fields), **self._ending()}

    def _lines(self, events: list[Event]) -> list[Event]:
        return [{**self._head, **self._body(event), "done": False} for event in events]

    def _ending(self) -> dict[str, Any]:
        assert self._last is not None
        is_cut = self._last.finish_reason is FinishReason.LENGTH
        timings = self._counter.timings()
        return {"done": True, "done_reason": "length" if is_cut else "stop", **durations(timings), "timings": timings}


def durations(timings: Mapping[str, float | int | None]) -> dict[str, int]:
    """Returns the counts and durations, in nanoseconds. Clients divide by them, so those that are zero are left out."""
    phases = {
        "total_duration": "e2e_ms",
        "load_duration": "queue_ms",
        "prompt_eval_duration": "prefill_ms",
        "eval_duration": "decode_ms",
    }
    in_ns = {name: round((timings[phase] or 0) * 1e6) for name, phase in phases.items()}
    counts = {"prompt_eval_count": timings["prompt_tokens"], "eval_count": timings["generated_tokens"]}
    return {name: int(value) for name, value in (in_ns | counts).items() if value}


def line(event: Mapping[str, Any]) -> bytes:
    return f"{_dumps(event)}\n".encode("ascii")


def resume_point(point: Mapping[str, Any]) -> bytes:
    """Returns the line that tells how a stream goes on on another server: a line of JSON, as all are."""
    return line({"resume_point": point})


_dumps = partial(json.dumps, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


class LineStream(TypedStream):
    """Turns the outputs of a plan of one generation into lines of JSON."""

    def encode(self, event: Mapping[str, Any]) -> bytes:
        return line(event)

    async def encode_last(self, event: Mapping[str, Any]) -> bytes:
        return line(event)
