"""Which of several forms a value has. Tags in angle brackets are left out of the path that an error names."""

from typing import Any

from pydantic import Discriminator


def type_of(value: Any) -> Any:
    """Of JSON, or of what was made of it."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def by_type(*known: str) -> Discriminator:
    """<text> for the type text if that is known, else <other>."""
    return Discriminator(lambda value: f"<{type_of(value)}>" if type_of(value) in known else "<other>")


def text_or(list_tag: str) -> Discriminator:
    """The tag for a list; else <text>."""
    return Discriminator(lambda value: list_tag if isinstance(value, list) else "<text>")
