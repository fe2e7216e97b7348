"""The built-in tools that clients run themselves, as functions: Anthropic's models know them, others must be told."""

import re
from collections.abc import Mapping
from typing import Any


def _object(required: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


_STRING = {"type": "string"}
_FILE = {"type": "string", "description": "The path of a file or a directory"}
_LINES = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "For view: the first and the last line to show, counted from 1; -1 is the end of the file",
}
_OLD = {"type": "string", "description": "For str_replace: text that occurs once in the file"}
_NEW = {"type": "string", "description": "For str_replace: what takes its place"}
_TEXT = {"type": "string", "description": "For create: the content of the file"}

_BASH = {
    "description": "Runs a command in a shell that keeps its state between calls, and returns what it prints.",
    "parameters": _object(
        "", command=_STRING, restart={"type": "boolean", "description": "Start a new shell instead of a command"}
    ),
}
# Without insert: versions of the tool name the inserted text differently. Models replace a line instead.
_EDITOR = {
    "description": "Shows files and directories, creates files, and replaces text in them.",
    "parameters": _object(
        "command path",
        command={"enum": ["view", "create", "str_replace"]},
        path=_FILE,
        view_range=_LINES,
        file_text=_TEXT,
        old_str=_OLD,
        new_str=_NEW,
    ),
}
_MEMORY = {
    "description": "Keeps notes between conversations, in files under /memories: look there first.",
    "parameters": _object(
        "command",
        command={"enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
        path={**_FILE, "description": "A file or a directory under /memories; rename has old_path and new_path"},
        view_range=_LINES,
        file_text=_TEXT,
        old_str=_OLD,
        new_str=_NEW,
        insert_line={"type": "integer", "description": "For insert: the line behind which to insert; 0 is the top"},
        insert_text={"type": "string", "description": "For insert: the text"},
        old_path={"type": "string", "description": "For rename"},
        new_path={"type": "string", "description": "For rename"},
    ),
}
_FUNCTIONS = {"bash": _BASH, "text_editor": _EDITOR, "memory": _MEMORY}


def function_of_type(kind: str) -> Mapping[str, Any] | None:
    """Returns description and parameters of a built-in tool; None for one that only Anthropic's servers can run, or
    whose results a model of text could not read."""
    return _FUNCTIONS.get(re.sub(r"_[0-9]{8}$", "", kind))
