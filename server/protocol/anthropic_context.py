"""`context_management` of Anthropic's API: what is taken out of the conversation before the model reads it."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from server.protocol.tags import type_of
from server.protocol.wire import MAX_INT32, ClosedModel

MAX_EDITS = 16


def _check_kind(kind: Any) -> Any:
    """Refuses edits that take results of tools out, or summarize: done in the background, they change what the model
    knows, and the client would not see it."""
    if isinstance(kind, str) and kind != "clear_thinking_20251015":
        message = "{kind} is not supported: take out of messages what the model should not read"
        raise PydanticCustomError("kind", message, {"kind": ascii(kind)[:40]})
    return kind


class _AllTurns(ClosedModel):
    type: Literal["all"]


class ThinkingTurns(ClosedModel):
    type: Literal["thinking_turns"]
    value: int = Field(ge=1, le=MAX_INT32)


def _keep_tag(keep: Any) -> str:
    if isinstance(keep, str):
        return "<all>"
    return "<all turns>" if type_of(keep) == "all" else "<turns>"


_Keep = Annotated[
    Annotated[Literal["all"], Tag("<all>")]
    | Annotated[_AllTurns, Tag("<all turns>")]
    | Annotated[ThinkingTurns, Tag("<turns>")],
    Discriminator(_keep_tag),
]


class ClearThinking(ClosedModel):
    type: Annotated[Literal["clear_thinking_20251015"], BeforeValidator(_check_kind)]
    keep: _Keep = ThinkingTurns(type="thinking_turns", value=1)


def _none_for_empty(value: Any) -> Any:
    return {} if value == [] else value


class _ContextManagement(ClosedModel):
    edits: list[ClearThinking] = Field([], max_length=MAX_EDITS, fail_fast=True)

    @property
    def num_thinking_turns(self) -> int | None:
        """How many of the assistant's newest turns keep their thinking; None for all."""
        kept = [edit.keep.value for edit in self.edits if isinstance(edit.keep, ThinkingTurns)]
        return min(kept, default=None)


ContextManagement = Annotated[_ContextManagement, BeforeValidator(_none_for_empty)]
