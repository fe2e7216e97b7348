"""Interface of the crash marker, which records the requests that the engine is about to work on.

The implementation is `engine.process.crash_marker`.
"""

from collections.abc import Sequence
from typing import Protocol


class Marker(Protocol):
    """Records which requests a crash of the engine process would be due to."""

    def mark(self, request_ids: Sequence[str]) -> None:
        """Records the requests, before work on them begins, in place of those recorded before."""


class NullMarker:
    """Records nothing: for engines that are not restarted after a crash."""

    def mark(self, request_ids: Sequence[str]) -> None:
        pass
