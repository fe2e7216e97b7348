"""Adapters (LoRA) as plain values. An adapter is told apart by the digest of its content, never by its name alone."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.core.errors import AdapterError

__all__ = ["AdapterInfo", "AdapterSource", "Adapters", "NoAdapters"]


class AdapterSource(msgspec.Struct, frozen=True):
    """An adapter that is to be loaded with the model."""

    name: str
    """What clients call it."""
    path: str
    """Its directory, as PEFT writes them."""
    digest: str | None = None
    """What its digest must be: that of its first load. An engine that restarts goes on without one whose files are
    others by then, or are gone. None at the first start, which fails if the adapter cannot be loaded."""


class AdapterInfo(msgspec.Struct, frozen=True):
    """What is known of an adapter that is loaded."""

    path: str
    digest: str
    """Hash of all its numbers, of the names of its modules and of their scales: 64 hexadecimal digits."""
    rank: int
    """The largest rank of its modules."""
    num_bytes: int
    """Memory that it holds."""


class Adapters(Protocol):
    """The adapters that are loaded over a model."""

    def load(self, path: str) -> AdapterInfo:
        """Loads an adapter; one that is loaded already, by its content, stays. Raises AdapterError."""

    def number_of(self, digest: str) -> int | None:
        """Returns the number that the adapter's rows have in a batch; None if it is not loaded or was unloaded."""

    def unload(self, digest: str) -> None:
        """Takes no more requests for the adapter, unless it is loaded again; one that is not loaded is ignored."""

    @property
    def unloaded(self) -> Sequence[int]:
        """Numbers of adapters that were unloaded and still hold memory."""

    def release(self, number: int) -> None:
        """Frees an unloaded adapter, of which no request is left."""


class NoAdapters:
    """Has no adapters, and loads none: the state of an engine without a model to which they could add."""

    unloaded: Sequence[int] = ()

    def load(self, path: str) -> AdapterInfo:
        raise AdapterError("This engine can have no adapters.")

    def number_of(self, digest: str) -> int | None:
        return None

    def unload(self, digest: str) -> None:
        pass

    def release(self, number: int) -> None:
        raise KeyError(number)
