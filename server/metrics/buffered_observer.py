"""Values that are worked off many at a time: the code for one alone finds the processor's caches taken by the model."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_HELD = 64


class BufferedObserver(Generic[T]):
    """Passes on every value, in order, some of them later."""

    def __init__(self, pass_on: Callable[[T], None]) -> None:
        self._pass_on = pass_on
        self._held: list[T] = []

    def add(self, value: T) -> None:
        self._held.append(value)
        if len(self._held) >= MAX_HELD:
            self.flush()

    def flush(self) -> None:
        """Pass on what is held."""
        held, self._held = self._held, []
        for value in held:
            self._pass_on(value)
