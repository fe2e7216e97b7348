"""Server-sent events: bytes as they arrive -> the data of each event. Nothing here knows HTTP or JSON."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SSEParser:
    """Incremental parser of a `text/event-stream` body (WHATWG HTML, section 9.2.6).

    Lines end in LF, CRLF or CR, and may be split anywhere between two reads. Comments and fields other than
    `data` are dropped: the completions protocol carries everything in `data`.
    """

    def __init__(self) -> None:
        self._partial_line = b""
        self._data_lines: list[bytes] = []
        self._after_cr = False
        self._at_start = True

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of each event that these bytes complete; the lines of one event are joined by LF."""
        if self._after_cr and data:
            # The CR that ended the last read already ended its line: an LF here is its second half.
            data = data.removeprefix(b"\n")
            self._after_cr = False
        data = self._partial_line + data
        self._after_cr = self._after_cr or data.endswith(b"\r")
        lines = data.splitlines(keepends=True)  # on bytes: LF, CR and CRLF only
        self._partial_line = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        events = []
        for line in lines:
            event = self._end_of_line(line.rstrip(b"\r\n"))
            if event is not None:
                events.append(event)
        return events

    def _end_of_line(self, line: bytes) -> bytes | None:
        """Takes a line; returns the event's data if it is the blank line that ends an event with data."""
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            if not self._data_lines:
                return None
            event = b"\n".join(self._data_lines)
            self._data_lines.clear()
            return event
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data_lines.append(value.removeprefix(b" "))
        return None
