"""Observes values in batches: between two steps of the model, the code that observes one is no longer in the
processor's caches."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_HELD = 64
"""Values that are buffered before they are passed on."""


class BufferedObserver(Generic[T]):
    """Passes every value on to `pass_on`, in order, MAX_HELD at a time."""

    def __init__(self, pass_on: Callable[[T], None]) -> None:
        self._pass_on = pass_on
        self._held: list[T] = []

    def add(self, value: T) -> None:
        self._held.append(value)
        if len(self._held) >= MAX_HELD:
            self.flush()

    def flush(self) -> None:
        """Passes on the buffered values."""
        held, self._held = self._held, []
        for value in held:
            self._pass_on(value)
