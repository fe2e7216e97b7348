"""Incremental parser of one HTTP/1.1 response: bytes as they arrive -> pieces of its body.

Why not httpx on the hot path: the client shares its cores with the server it measures. With 32 streams of one small
chunk per token, reading and JSON-parsing them cost 173 to 223 microseconds of CPU per token with httpx, 57 to 81 with
a bare asyncio reader (same machine, alternating runs). So streams are read by this parser; everything outside the
measured window uses httpx.
"""

import re
from collections.abc import Callable

from loadtest.errors import ProtocolError

_MAX_HEAD_BYTES = 65_536
_HEX = re.compile(rb"[0-9A-Fa-f]{1,16}")
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: .*)?")


class ResponseParser:
    """Parses one response. Body bytes are returned as they arrive, without waiting for a whole chunk.

    `status` is None until the head is complete; header names are lower case. Raises ProtocolError on invalid input.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self._buffer = bytearray()
        self._num_expected = 0  # bytes left in this chunk, or in a body with Content-Length
        self._pieces: list[bytes] = []
        self._state: Callable[[], bool] = self._read_head  # each returns False when it needs more bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the pieces of the body in these bytes. Bytes after the end of the response are an error."""
        self._buffer += data
        while not self.is_complete and self._state():
            pass
        if self.is_complete and self._buffer:
            raise ProtocolError("bytes after the end of the response")
        pieces, self._pieces = self._pieces, []
        return pieces

    def feed_eof(self) -> None:
        """Takes the end of the connection, which is an error unless it is what ends the body."""
        if self._state == self._read_until_eof:
            self.is_complete = True
        if not self.is_complete:
            where = "before the response's head" if self.status is None else "in the middle of the body"
            raise ProtocolError(f"connection closed {where}")

    def _take_line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise ProtocolError("a line of the response is too long")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise ProtocolError("the response's head is too long")
            return False
        status_line, *header_lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        match = _STATUS_LINE.fullmatch(status_line)
        if match is None:
            raise ProtocolError(f"not an HTTP/1.1 status line: {status_line[:80]!r}")
        if match[1].startswith(b"1"):  # 100 Continue and its like precede the response
            return True
        self.status = int(match[1])
        self.headers = _parse_headers(header_lines)
        self._choose_body()
        return True

    def _choose_body(self) -> None:
        length = self.headers.get("content-length", "")
        if self.status in (204, 304):
            self.is_complete = True
        elif self.headers.get("transfer-encoding", "").lower().split(",")[-1].strip() == "chunked":
            self._state = self._read_chunk_size
        elif length:
            if not (length.isascii() and length.isdigit()):
                raise ProtocolError(f"not a Content-Length: {length[:40]!r}")
            self._num_expected = int(length)
            self._state = self._read_length
            self.is_complete = self._num_expected == 0
        else:
            self._state = self._read_until_eof

    def _take_body(self) -> int:
        """Moves the expected bytes that have arrived to the output; returns their number."""
        piece = bytes(self._buffer[: self._num_expected])
        del self._buffer[: len(piece)]
        self._num_expected -= len(piece)
        if piece:
            self._pieces.append(piece)
        return len(piece)

    def _read_length(self) -> bool:
        progress = self._take_body() > 0
        self.is_complete = self._num_expected == 0
        return progress

    def _read_until_eof(self) -> bool:
        self._num_expected = len(self._buffer)
        return self._take_body() > 0

    def _read_chunk_size(self) -> bool:
        line = self._take_line()
        if line is None:
            return False
        size = line.partition(b";")[0].strip()
        if not _HEX.fullmatch(size):
            raise ProtocolError(f"not a chunk size: {line[:40]!r}")
        self._num_expected = int(size, 16)
        self._state = self._read_chunk if self._num_expected else self._read_trailers
        return True

    def _read_chunk(self) -> bool:
        if self._num_expected:
            return self._take_body() > 0
        if len(self._buffer) < 2:
            return False
        if self._buffer[:2] != b"\r\n":
            raise ProtocolError("a chunk is longer than its size says")
        del self._buffer[:2]
        self._state = self._read_chunk_size
        return True

    def _read_trailers(self) -> bool:
        line = self._take_line()
        if line is None:
            return False
        self.is_complete = not line
        return True


def _parse_headers(lines: list[bytes]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        raw_name, colon, raw_value = line.partition(b":")
        if not colon:
            raise ProtocolError(f"not a header: {line[:80]!r}")
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1").strip()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
