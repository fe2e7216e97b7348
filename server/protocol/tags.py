"""Discriminators: which form of a union a value has. Tags in angle brackets are left out of the path that an error
names."""

from typing import Any

from pydantic import BaseModel, Discriminator


def field_of(value: Any, name: str, default: Any = None) -> Any:
    """Returns a field of a JSON object, or of the model made of one."""
    return value.get(name, default) if isinstance(value, dict) else getattr(value, name, default)


def type_of(value: Any) -> Any:
    return field_of(value, "type")


def by_type(*known: str) -> Discriminator:
    """Returns a discriminator by the value's type: <text> for the type text if that is `known`, else <other>."""
    return Discriminator(lambda value: f"<{type_of(value)}>" if type_of(value) in known else "<other>")


def text_or(list_tag: str) -> Discriminator:
    """Returns a discriminator that gives `list_tag` for a list, else <text>."""
    return Discriminator(lambda value: list_tag if isinstance(value, list) else "<text>")


def choice_tag(choice: Any) -> str:
    """Returns the tag of a `tool_choice`: a mode, a named function, or a list of allowed ones."""
    if type_of(choice) == "allowed_tools":
        return "<allowed>"
    return "<named>" if isinstance(choice, dict | BaseModel) else "<mode>"
