"""Which of several forms a value has. Tags in angle brackets are left out of the path that an error names."""

from typing import Any

from pydantic import BaseModel, Discriminator


def field_of(value: Any, name: str, default: Any = None) -> Any:
    """Of JSON, or of what was made of it."""
    return value.get(name, default) if isinstance(value, dict) else getattr(value, name, default)


def type_of(value: Any) -> Any:
    return field_of(value, "type")


def by_type(*known: str) -> Discriminator:
    """<text> for the type text if that is known, else <other>."""
    return Discriminator(lambda value: f"<{type_of(value)}>" if type_of(value) in known else "<other>")


def text_or(list_tag: str) -> Discriminator:
    """The tag for a list; else <text>."""
    return Discriminator(lambda value: list_tag if isinstance(value, list) else "<text>")


def choice_tag(choice: Any) -> str:
    """Of a tool_choice."""
    if type_of(choice) == "allowed_tools":
        return "<allowed>"
    return "<named>" if isinstance(choice, dict | BaseModel) else "<mode>"
