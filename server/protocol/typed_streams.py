"""What requests of the APIs whose streams have typed events, or lines, share."""

from typing import Self

from pydantic import Field, model_validator

from server.protocol.generation import wrong
from server.protocol.wire import WireModel


class TypedStreamFields(WireModel):
    stream: bool = False
    resume_points: bool = Field(
        False,
        description="Only with stream: behind the events of each step but the last, a comment, or in a stream of lines "
        "another line, tells how the stream goes on on another server.",
    )

    @model_validator(mode="after")
    def _check_resume_points(self) -> Self:
        if self.resume_points and not self.stream:
            raise wrong("resume_points", "is only allowed with stream")
        return self
