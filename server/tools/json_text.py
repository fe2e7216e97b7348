"""JSON as models read and write it: characters stand for themselves."""

import json

__all__ = ["json_text"]


def json_text(value: object) -> str:
    """Returns the value as JSON, with a space after commas and colons, and no escape that JSON does not want."""
    return json.dumps(value, ensure_ascii=False)
