"""The text of one message, fed as it is generated -> pieces."""

from collections.abc import Collection

from server.tools.pieces import Piece
from server.tools.readers import Reader
from server.tools.tape import Tape


class MessageParser:
    """Pieces come as soon as they are certain; what may yet be part of a call or of a mark is held back."""

    def __init__(self, reader: Reader, names: Collection[str] = ()) -> None:
        """`names` are the functions that may be called."""
        self._tape = Tape(names)
        self._reading = reader(self._tape)

    def feed(self, text: str) -> list[Piece]:
        self._tape.feed(text)
        return self._read()

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the text."""
        self._tape.end()
        return self._read()

    def _read(self) -> list[Piece]:
        next(self._reading, None)
        return self._tape.take_pieces()
