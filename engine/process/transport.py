"""Typed messages over a pair of local stream sockets: msgpack that is checked against the message types, never pickle.

The server makes the pair and starts the engine process with one end: nobody else can connect, and nothing stays behind.
A message costs one system call at each end. A library with threads of its own would wake two of them for it, on cores
that the model's kernels use at that moment. Messages are numbered: one that is lost, or does not decode, would be a
token that never arrives, so it ends the connection.
"""

import asyncio
import contextlib
import logging
import os
import select
import socket
import struct
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from engine.core.errors import TwostepError
from engine.core.messages import FromEngine, ToEngine

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("!QQ")  # a message's number on this connection, and its length
_READ_BYTES = 2**14
_READS_A_TURN = 16  # of the event loop, whose other callbacks wait meanwhile


class ServerGoneError(Exception):
    """The process that started this one has ended."""


class BrokenLinkError(Exception):
    """A message was lost, or arrived as something else."""


class ServerLink:
    """The server's end, for the event loop's thread. Each message is passed to `on_message` as it arrives.

    After a message that is broken, or that its handler fails on, which `on_broken` hears of, nothing is passed on any
    more.
    """

    def __init__(self, on_message: Callable[[FromEngine], None], on_broken: Callable[[BrokenLinkError], None]) -> None:
        """Raises OSError when no descriptors are left."""
        self._on_message = on_message
        self._on_broken = on_broken
        self._frames = _Frames(msgspec.msgpack.Decoder(FromEngine))
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._is_closed = False
        self._socket, self.engine_end = socket.socketpair()
        """The socket for the engine process. That must be the only one to keep it: close it here."""
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._receive_in_turn)

    def send(self, message: ToEngine) -> None:
        """Queue a message. Never blocks: the queue has no limit but what admission control sets."""
        if self._is_closed:
            return
        self._unsent += self._frames.pack(message)
        self._send_rest()

    def _send_rest(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the engine has ended, which its ChildProcess reports
            self._unsent.clear()
        if self._unsent:
            self._loop.add_writer(self._socket.fileno(), self._send_rest)
        else:
            self._loop.remove_writer(self._socket.fileno())

    def receive(self) -> None:
        """Pass on every message that has arrived."""
        while self._read() == _READ_BYTES:
            pass

    def _receive_in_turn(self) -> None:
        """Passes on what has arrived, and of much the beginning: the loop calls this again in its next turn."""
        for _ in range(_READS_A_TURN):
            if self._read() != _READ_BYTES:
                return

    def _read(self) -> int:
        """Passes on the messages that end among the next bytes. Returns how many bytes there were."""
        if self._is_closed:
            return 0
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:  # the engine has ended, which its ChildProcess reports
            self._loop.remove_reader(self._socket.fileno())
        self._frames.feed(data)
        self._pass_on()
        return len(data)

    def _pass_on(self) -> None:
        while not self._is_closed:
            try:
                message = self._frames.unpack()
                if message is None:
                    return
                self._handle(message)
            except BrokenLinkError as error:
                self.close()
                self._on_broken(error)

    def _handle(self, message: FromEngine) -> None:
        """Raises BrokenLinkError if the handler fails: some of the message's tokens may not have arrived, and only
        another engine process can send them once more."""
        try:
            self._on_message(message)
        except Exception as error:
            logger.exception("handling a message from the engine failed")
            raise BrokenLinkError(f"A message from the engine could not be handled: {error!r}") from error

    def close(self) -> None:
        """Idempotent; unsent messages are dropped."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self.engine_end.close()


class EngineLink:
    """The engine process's end: blocking, for one thread."""

    def __init__(self, fd: int) -> None:
        """`fd` is the server's `engine_end`."""
        os.set_inheritable(fd, False)  # what this process starts must not hold the connection
        self._frames = _Frames(msgspec.msgpack.Decoder(ToEngine))
        self._socket = socket.socket(fileno=fd)
        self._arrival = select.poll()
        self._arrival.register(fd, select.POLLIN)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """Returns every message that has arrived; waits at most `timeout_s` for the first one.

        Raises ServerGoneError and BrokenLinkError.
        """
        if timeout_s > 0:
            self._arrival.poll(timeout_s * 1000)
        while (num_read := self._read()) == _READ_BYTES:
            pass
        messages: list[ToEngine] = []
        while (message := self._frames.unpack()) is not None:
            messages.append(message)
        if num_read == 0 and not messages:
            raise ServerGoneError
        return messages

    def has_arrived(self) -> bool:
        """Whether `receive` would find something, if only that the server is gone."""
        return bool(self._arrival.poll(0))

    def _read(self) -> int | None:
        """Returns how many bytes there were: 0 from a server that is gone, None if nothing has arrived."""
        try:
            data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return 0
        self._frames.feed(data)
        return len(data)

    def send(self, message: FromEngine) -> None:
        """Send a message. Blocks while some 200 steps are unread, which the server soon reads, whatever else it does.
        Without a server the message is dropped, and `receive` will raise."""
        with contextlib.suppress(OSError):
            self._socket.sendall(self._frames.pack(message))

    def close(self) -> None:
        """Close this end; what was sent can still be read."""
        self._socket.close()


Received = TypeVar("Received")


class _Frames(Generic[Received]):
    """Messages as bytes: a header, then msgpack."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[Received]") -> None:
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._num_packed = 0
        self._num_unpacked = 0
        self._fed = bytearray()

    def pack(self, message: ToEngine | FromEngine) -> bytes:
        data = self._encoder.encode(message)
        header = _HEADER.pack(self._num_packed, len(data))
        self._num_packed += 1
        return header + data

    def feed(self, data: bytes) -> None:
        self._fed += data

    def unpack(self) -> Received | None:
        """Returns the next message of what was fed, or None if it is not complete. Raises BrokenLinkError."""
        if len(self._fed) < _HEADER.size:
            return None
        number, length = _HEADER.unpack_from(self._fed)
        if number != self._num_unpacked:
            raise BrokenLinkError(f"Message {self._num_unpacked} between server and engine is not the next to arrive.")
        end = _HEADER.size + length
        if len(self._fed) < end:
            return None
        data = self._fed[_HEADER.size : end]
        del self._fed[:end]
        self._num_unpacked += 1
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, TwostepError) as error:
            raise BrokenLinkError(f"A message between server and engine cannot be read: {error}") from error
