"""The messages of a conversation, by role. Errors name the place: `messages.0.content.1`."""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from server.protocol.tags import by_type, field_of, text_or
from server.protocol.wire import MAX_VALUES, Text, WireModel, check_size

MAX_MESSAGES = 2**14
MAX_PARTS = 1024
MAX_PARTS_TOGETHER = 2**14
MAX_TOOL_CALLS = 128
_PARTS = ("content", "tool_calls", "summary", "output")  # fields that hold lists of parts, in any of the APIs
_DEPTH = 2  # parts of Anthropic's tool results have parts


class TextPart(WireModel):
    type: Literal["text"]
    text: Text


class RefusalPart(WireModel):
    type: Literal["refusal"]
    refusal: Text


def refusing_part(*types: str) -> Callable[[Any], Any]:
    """Returns a validator that refuses a part by its type: images, audio, files, and text that is not of `types`."""

    def refuse(data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        about = {"kind": ascii(kind)[:40] if isinstance(kind, str) else "this", "types": " or ".join(types)}
        message = "{kind} is not supported: the model reads text only, in parts of the type {types}"
        raise PydanticCustomError("part", message, about)

    return refuse


OMITTED_IMAGE = "[image omitted: this model reads text only]"


def omitting_image(kind: str) -> Callable[[Any], Any]:
    """Returns a validator that takes an image for a part of this type, whose text says that there was one. Agents
    cannot help sending back the images that their tools return, and the model must know that it does not see them."""
    return lambda data: {"type": kind, "text": OMITTED_IMAGE} if isinstance(data, dict) else data


class _UnsupportedPart(TextPart):
    _refuse = model_validator(mode="before")(refusing_part("text"))


class _OmittedImage(TextPart):
    _omit = model_validator(mode="before")(omitting_image("text"))


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[SkipJsonSchema[_UnsupportedPart], Tag("<other>")],
    by_type("text", "refusal"),
]
Content = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")],
    text_or("<parts>"),
]
ResultPart = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[SkipJsonSchema[_OmittedImage], Tag("<image_url>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[SkipJsonSchema[_UnsupportedPart], Tag("<other>")],
    by_type("text", "refusal", "image_url"),
]
ResultContent = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[ResultPart], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")],
    text_or("<parts>"),
]
"""A tool's result, in which images are told of in text. It may be a list without parts: MCP servers return one for a
tool that has nothing to return."""


class _Message(WireModel):
    """A message. Fields that its role does not define reach the chat template: some templates have their own."""

    model_config = ConfigDict(extra="allow")

    name: Text | None = None


class SystemMessage(_Message):
    role: Literal["system", "developer"]
    content: Content


class UserMessage(_Message):
    role: Literal["user"]
    content: Content


class ToolMessage(_Message):
    """A tool's result. Programs in Go leave out the content of one that is empty."""

    role: Literal["tool"]
    content: ResultContent = ""
    tool_call_id: Text

    @model_validator(mode="after")
    def _check(self) -> "ToolMessage":
        if self.model_extra and "content" not in self.model_fields_set:
            message = "A tool's message needs content: {name} is none"
            raise PydanticCustomError("content", message, {"name": ascii(next(iter(self.model_extra)))[:40]})
        return self


class FunctionCall(WireModel):
    """A function call in a conversation's history. The arguments that the model wrote may be malformed or cut off, and
    programs in Go leave out empty ones."""

    name: Text
    arguments: Text = ""

    @property
    def parsed_arguments(self) -> dict[str, Any] | None:
        """The arguments as an object, which chat templates expect; None if the text is no JSON object."""
        try:
            parsed = json.loads(self.arguments) if self.arguments else {}
        except (ValueError, RecursionError):
            return None
        return parsed if isinstance(parsed, dict) else None


class MessageToolCall(WireModel):
    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(_Message):
    role: Literal["assistant"]
    content: Annotated[Content | None, BeforeValidator(lambda content: None if content == [] else content)] = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = Field(None, description="Another name of reasoning_content.")
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] = Field([])

    @model_validator(mode="after")
    def _check(self) -> "AssistantMessage":
        for name in ("audio", "function_call"):
            if name in (self.model_extra or {}):
                raise PydanticCustomError("field", "{name} is not supported", {"name": name})
        given = (self.content, self.refusal, self.reasoning_content, self.reasoning)
        if not self.tool_calls and all(each is None for each in given):
            message = "An assistant's message needs content, refusal, reasoning_content or tool_calls"
            raise PydanticCustomError("content", message)
        return self


class _UnknownMessage(_Message):
    """A message without a known role. Never valid."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content


def _role_tag(message: Any) -> str:
    role = field_of(message, "role")
    known = {"system": "<system>", "developer": "<system>", "user": "<user>", "assistant": "<assistant>"}
    return {**known, "tool": "<tool>"}.get(role, "<unknown>") if isinstance(role, str) else "<unknown>"


Message = Annotated[
    Annotated[SystemMessage, Tag("<system>")]
    | Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")]
    | Annotated[SkipJsonSchema[_UnknownMessage], Tag("<unknown>")],
    Discriminator(_role_tag),
]


def _check_parts(messages: Any) -> Any:
    """Refuses too many messages or parts before pydantic validates each of them, which would block the event loop."""
    entries: Iterable[Any] = messages if isinstance(messages, list) else ()
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise PydanticCustomError("too_long", "Must not have more than {limit} items", {"limit": MAX_MESSAGES})
    num_parts, arguments = 0, list[Any]()
    for _ in range(_DEPTH):
        dicts = [entry for entry in entries if isinstance(entry, dict)]
        lists = [entry[name] for entry in dicts for name in _PARTS if isinstance(entry.get(name), list)]
        num_parts += sum(map(len, lists))
        if num_parts > MAX_PARTS_TOGETHER:
            message = "Must not have more than {limit} parts and tool calls together"
            raise PydanticCustomError("too_long", message, {"limit": MAX_PARTS_TOGETHER})
        arguments += map(_arguments, dicts)
        entries = chain.from_iterable(lists)
    _check_arguments_together(arguments)
    return messages


def _check_arguments_together(arguments: Sequence[Any]) -> None:
    """Refuses too many values in the arguments of all calls: objects, or JSON strings, in which commas are counted."""
    if sum(each.count(",") for each in arguments if isinstance(each, str)) > MAX_VALUES:
        message = "Must not have more than {limit} commas in the arguments of calls together"
        raise PydanticCustomError("too_long", message, {"limit": MAX_VALUES})
    check_size([each for each in arguments if isinstance(each, dict)])


def _arguments(entry: dict[str, Any]) -> Any:
    """Returns the arguments of a tool call in any of the APIs' forms; None for other entries."""
    function = entry.get("function")
    return function.get("arguments") if isinstance(function, dict) else entry.get("arguments", entry.get("input"))


bounded_parts = BeforeValidator(_check_parts)
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), bounded_parts]
