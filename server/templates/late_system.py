"""System messages behind the first turn, for chat templates that take them only where a conversation begins."""

from collections.abc import Mapping, Sequence
from typing import Any

_ROLES = ("system", "developer")


def as_user_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the conversation with later system messages as text of the user, one message with the user's own beside
    them: many templates want user and assistant to take turns. Each content is a text."""
    num_first = next((index for index, each in enumerate(messages) if each["role"] not in _ROLES), len(messages))
    converted = [dict(message) for message in messages[:num_first]]
    is_late = False
    for message in messages[num_first:]:
        was_late, is_late = is_late, message["role"] in _ROLES
        is_appended = is_late or (was_late and message["role"] == "user")
        if is_appended and converted[-1]["role"] == "user":
            converted[-1]["content"] += f"\n\n{message['content']}"
        else:
            converted.append({**message, "role": "user"} if is_late else dict(message))
    return converted
