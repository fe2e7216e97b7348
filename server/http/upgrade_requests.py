"""Requests with an `Upgrade` header, whose bodies are read and which are answered over HTTP/1.1.

Java's HTTP client asks for HTTP/2 with every first request, and sends the body along. The parser takes what follows
such a head for the other protocol and reads no more of it.
"""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_FRAMING = (b"content-length", b"transfer-encoding")


class _Reader(Protocol):
    def on_body(self, body: bytes) -> None: ...

    def on_message_complete(self) -> None: ...


class BodyParser:
    """Parses one body, framed as `framing` declares, and nothing that follows it."""

    def __init__(self, reader: _Reader, framing: Sequence[tuple[bytes, bytes]]) -> None:
        self._reader = reader
        self._is_complete = False
        self._parser = httptools.HttpRequestParser(self)
        lines = (b"%s: %s\r\n" % header for header in framing)
        self._parser.feed_data(b"".join((b"POST / HTTP/1.1\r\n", *lines, b"\r\n")))

    def feed_data(self, data: bytes) -> None:
        """Parses more of the body. Raises HttpParserError for a body that is not framed as declared."""
        try:
            if not self._is_complete:
                self._parser.feed_data(data)
        except httptools.HttpParserError:
            if not self._is_complete:
                raise

    def should_upgrade(self) -> bool:
        return False

    def on_body(self, body: bytes) -> None:
        if not self._is_complete:
            self._reader.on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_complete:
            self._reader.on_message_complete()
            self._is_complete = True


class UpgradeProtocol(HttpToolsProtocol):
    """A connection that answers a request with an `Upgrade` header, body included, and then closes."""

    _framing: Sequence[tuple[bytes, bytes]] = ()  # of a body that the parser does not read

    @property
    def awaits_body(self) -> bool:
        """Whether the parser reported a message as complete whose body is yet to be read."""
        return len(self._framing) > 0

    def feed(self, data: bytes) -> None:
        """Parses data from the client. Raises HttpParserError, and HttpParserUpgrade where nothing more is to be
        read."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._framing:
                raise
            framing, self._framing = self._framing, ()
            self.parser = cast(Any, BodyParser(self, framing))
            self.parser.feed_data(data[upgrade.args[0] :])

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False
            if self.parser.get_method() != b"CONNECT":
                self._framing = [header for header in self.headers if header[0] in _FRAMING]
