"""The input of a custom tool, read out of the call's arguments, `{"input": "..."}`, while the model writes them."""

import json
import re
from collections.abc import Iterator

from server.protocol.tools import INPUT

_OPENING = f'{{"{INPUT}":"'
_BEGINNING = re.compile(rf'\s*{{\s*"{INPUT}"\s*:\s*"')
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_PIECE = re.compile(
    rf'[^"\\]+|{_HIGH}{_LOW}|(?!{_HIGH})\\u[0-9a-fA-F]{{4}}|\\[^u]|{_HIGH}(?!{_LOW})(?=.{{6}}|[^\\])|"', re.S
)


class CustomInput:
    """Decodes the string as it arrives. Arguments of another form than was asked for are the input as they are."""

    def __init__(self) -> None:
        self._unread = ""
        self._is_inside = self._is_over = self._is_raw = False

    def feed(self, arguments: str) -> str:
        """Returns the text that these further arguments add."""
        self._unread += arguments
        if not self._is_inside and not self._is_raw:
            self._begin()
        if self._is_raw:
            text, self._unread = self._unread, ""
            return text
        return "".join(self._decoded()) if self._is_inside else ""

    def _begin(self) -> None:
        if beginning := _BEGINNING.match(self._unread):
            self._is_inside, self._unread = True, self._unread[beginning.end() :]
        else:
            self._is_raw = not _OPENING.startswith("".join(self._unread.split()))

    def _decoded(self) -> Iterator[str]:
        """Yields the text of all characters that have arrived whole."""
        position = 0
        while not self._is_over and (piece := _PIECE.match(self._unread, position)):
            position = piece.end()
            self._is_over = piece[0] == '"'
            yield _decode(piece[0])
        self._unread = self._unread[position:]


def _decode(piece: str) -> str:
    if piece[0] != "\\":
        return piece.removesuffix('"')
    try:
        text: str = json.loads(f'"{piece}"')
    except ValueError:
        return piece  # an escape that JSON does not have
    return text.encode(errors="replace").decode()
