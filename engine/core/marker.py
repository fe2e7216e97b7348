"""Who is told which requests a step computes, before it begins; the file behind it is the engine process's."""

from collections.abc import Sequence
from typing import Protocol


class Marker(Protocol):
    def mark(self, request_ids: Sequence[str]) -> None: ...


class NullMarker:
    """Marks nothing: for engines that nobody starts again."""

    def mark(self, request_ids: Sequence[str]) -> None:
        pass
