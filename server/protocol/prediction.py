"""OpenAI's predicted outputs: what most of an answer is known to be before it is written."""

from typing import Annotated, Literal

from pydantic import Field, Tag

from server.protocol.messages import MAX_PARTS, TextPart
from server.protocol.tags import text_or
from server.protocol.wire import ClosedModel, Text

PredictedContent = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")],
    text_or("<parts>"),
]


class Prediction(ClosedModel):
    type: Literal["content"]
    content: PredictedContent

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
