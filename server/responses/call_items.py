"""Calls in a response's output: each as events while it is written, and whole."""

from typing import Any

from server.chat.blocks import Event
from server.responses.custom_input import CustomInput
from server.responses.function_tools import OfferedTool
from server.responses.item_state import ItemState, PendingLogprobs
from server.tools.message_parts import Part, ToolCall


class CallItem:
    """A call of a function, or of a custom tool, whose arguments are text."""

    def __init__(self, call: ToolCall, tool: OfferedTool, state: ItemState, pending: PendingLogprobs) -> None:
        self._call = call
        self._tool = tool
        self._state = state
        self._pending = pending
        self._written = ""
        self._input = CustomInput() if tool.takes_text else None

    def start(self) -> list[Event]:
        return [self._state.added(self.whole())]

    def add(self, part: Part) -> list[Event]:
        assert isinstance(part, ToolCall)
        self._pending.take()
        delta = part.arguments if self._input is None else self._input.feed(part.arguments)
        if not delta:
            return []
        self._written += delta
        return [self._state.event(f"{self._field_event}.delta", delta=delta)]

    def end(self, is_complete: bool) -> list[Event]:
        self._state.end(is_complete)
        name = {} if self._tool.takes_text else {"name": self._tool.name}
        done = self._state.event(f"{self._field_event}.done", **name, **self._field())
        return [done, self._state.done(self.whole())]

    def whole(self) -> dict[str, Any]:
        namespace = {} if self._tool.namespace is None else {"namespace": self._tool.namespace}
        return {
            "id": self._state.item_id,
            "type": "custom_tool_call" if self._tool.takes_text else "function_call",
            "status": self._state.status,
            "call_id": self._call.id,
            "name": self._tool.name,
            **namespace,
            **self._field(),
        }

    @property
    def _field_event(self) -> str:
        return "custom_tool_call_input" if self._tool.takes_text else "function_call_arguments"

    def _field(self) -> dict[str, str]:
        return {"input" if self._tool.takes_text else "arguments": self._written}
