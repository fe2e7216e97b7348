"""Items of a response's `input` that tell of tools other than functions: their calls, and what these returned."""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag, model_validator

from server.protocol.messages import MAX_PARTS
from server.protocol.tags import text_or
from server.protocol.wire import JsonObject, Text, WireModel, check_serializable

_Object = Annotated[JsonObject, AfterValidator(check_serializable)]
_Objects = Annotated[list[_Object], Field(max_length=MAX_PARTS, fail_fast=True)]


class CustomCallItem(WireModel):
    """A call of a custom tool, whose input is text."""

    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    input: Text

    @property
    def arguments(self) -> str:
        return _json({"input": self.input})


class _ClientTool(WireModel):
    """A call of a tool that the client runs, or what it returned. Some have their call's id as their own."""

    call_id: Text

    @model_validator(mode="before")
    @classmethod
    def _take_id(cls, data: Any) -> Any:
        has_id = isinstance(data, dict) and data.get("call_id") is None and "id" in data
        return {**data, "call_id": data["id"]} if has_id else data


class ClientToolCallItem(_ClientTool):
    """A call of a shell or of a patch."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    action: _Object = Field({}, description="What the shell ran.")
    operation: _Object = Field({}, description="What the patch changed.")

    @property
    def name(self) -> str:
        return self.type.removesuffix("_call")

    @property
    def arguments(self) -> str:
        return _json(self.action or self.operation)


class ClientToolOutputItem(_ClientTool):
    type: Literal["local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    output: Annotated[
        Annotated[Text, Tag("<text>")] | Annotated[_Objects, Tag("<parts>")],
        text_or("<parts>"),
    ] = ""

    @property
    def text(self) -> str:
        if isinstance(self.output, str):
            return self.output
        return _lines(part.get(name) for part in self.output for name in ("stdout", "stderr", "text"))


class McpCallItem(WireModel):
    """A call of a tool of an MCP server, and what it returned."""

    type: Literal["mcp_call"]
    id: Text
    name: Text
    arguments: Text
    output: Text = ""

    @property
    def text(self) -> str:
        return self.output


class CodeRunItem(WireModel):
    """A run of code, and what it wrote."""

    type: Literal["code_interpreter_call"]
    id: Text
    code: Text = ""
    outputs: _Objects = Field([])

    @property
    def name(self) -> str:
        return "code_interpreter"

    @property
    def arguments(self) -> str:
        return _json({"code": self.code})

    @property
    def text(self) -> str:
        return _lines(each.get("logs") for each in self.outputs)


class FileSearchItem(WireModel):
    """A search in files, and the text that it found."""

    type: Literal["file_search_call"]
    id: Text
    queries: Annotated[list[Text], Field(max_length=MAX_PARTS, fail_fast=True)] = Field([])
    results: _Objects = Field([])

    @property
    def name(self) -> str:
        return "file_search"

    @property
    def arguments(self) -> str:
        return _json({"queries": self.queries})

    @property
    def text(self) -> str:
        return _lines(each.get(name) for each in self.results for name in ("filename", "text"))


class LeftOutItem(WireModel):
    """An item without text for the model."""

    type: Literal[
        "web_search_call",
        "image_generation_call",
        "computer_call",
        "computer_call_output",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "tool_search_call",
        "redacted_thinking",
    ]


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _lines(texts: Iterable[Any]) -> str:
    return "\n".join(text for text in texts if isinstance(text, str) and text)
