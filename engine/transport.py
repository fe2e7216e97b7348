"""Typed messages over a local ZeroMQ socket: msgpack that is checked against the message types, never pickle.

The engine process binds a socket in a directory private to the server, which connects: a connecting end keeps what is
sent before the other end is there, and never blocks. Messages are numbered: one that is lost, or does not decode, would
be a token that never arrives, so it ends the connection. Reading the socket from the event loop's own poll takes half
the CPU time per message that zmq.asyncio does.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import zmq

from engine.errors import TwostepError
from engine.messages import FromEngine, ToEngine

logger = logging.getLogger(__name__)

_CONNECT_EVERY_MS = 20


_NUMBER_BYTES = 8


class ServerGoneError(Exception):
    """The process that started this one has ended."""


class BrokenLinkError(Exception):
    """A message was lost, or arrived as something else."""


class ServerLink:
    """The server's end, for the event loop's thread. Each message is passed to `on_message` as it arrives.

    After a broken one, told to `on_broken`, nothing is passed on any more.
    """

    def __init__(self, on_message: Callable[[FromEngine], None], on_broken: Callable[[BrokenLinkError], None]) -> None:
        self._on_message = on_message
        self._on_broken = on_broken
        self._frames = _Frames(msgspec.msgpack.Decoder(FromEngine))
        self._loop = asyncio.get_running_loop()
        self._directory = tempfile.mkdtemp(prefix="twostep-")  # mode 0700: nobody else can connect
        self.address = f"ipc://{self._directory}/engine"
        self._context = zmq.Context()
        try:
            self._socket = _pair(self._context)
            self._socket.setsockopt(zmq.RECONNECT_IVL, _CONNECT_EVERY_MS)
            self._socket.connect(self.address)
        except zmq.ZMQError as error:  # no descriptors are left, say
            self._context.destroy(linger=0)
            shutil.rmtree(self._directory, ignore_errors=True)
            raise OSError(error.errno, str(error)) from error
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self.receive)

    def send(self, message: ToEngine) -> None:
        """Never blocks: the queue has no limit but what admission sets."""
        if self._socket.closed:
            return
        self._socket.send(self._frames.pack(message), zmq.NOBLOCK)
        # ZeroMQ's descriptor signals changes only, and sending may consume the signal of a message that came meanwhile.
        if _has_message(self._socket):
            self._loop.call_soon(self.receive)

    def receive(self) -> None:
        """Pass on every message that has arrived."""
        while not self._socket.closed and _has_message(self._socket):
            try:
                message = self._frames.unpack(self._socket.recv(zmq.NOBLOCK))
            except BrokenLinkError as error:
                self.close()
                self._on_broken(error)
                return
            try:
                self._on_message(message)
            except Exception:
                logger.exception("handling a message from the engine failed")

    def close(self) -> None:
        """Idempotent; unsent messages are dropped and the socket's directory is removed."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._fd)
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)


class EngineLink:
    """The engine process's end. Blocking, one thread."""

    def __init__(self, address: str, parent_fd: int | None = None) -> None:
        """`parent_fd` is a pipe's read end that nobody writes to: its end is the end of the server process."""
        self._parent_fd = parent_fd
        self._frames = _Frames(msgspec.msgpack.Decoder(ToEngine))
        self._context = zmq.Context()
        self._socket = _pair(self._context)
        self._socket.bind(address)
        self._path = Path(address.removeprefix("ipc://"))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if parent_fd is not None:
            self._poller.register(parent_fd, zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """Every message that has arrived; waits for the first one at most so long.

        Raises ServerGoneError and BrokenLinkError.
        """
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._parent_fd is not None and self._parent_fd in ready and not os.read(self._parent_fd, 1):
            raise ServerGoneError
        messages: list[ToEngine] = []
        while _has_message(self._socket):
            messages.append(self._frames.unpack(self._socket.recv(zmq.NOBLOCK)))
        return messages

    def send(self, message: FromEngine) -> None:
        """Never blocks. Without a server the message is dropped; `receive` will tell."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(self._frames.pack(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Waits a moment for the last messages to leave. A server that was killed cannot remove the directory."""
        self._context.destroy(linger=1000)
        with contextlib.suppress(OSError):
            self._path.unlink()
            self._path.parent.rmdir()


Received = TypeVar("Received")


class _Frames(Generic[Received]):
    """Messages as bytes: the number of the message on this connection, then msgpack."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[Received]") -> None:
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._num_packed = 0
        self._num_unpacked = 0

    def pack(self, message: ToEngine | FromEngine) -> bytes:
        data = self._num_packed.to_bytes(_NUMBER_BYTES) + self._encoder.encode(message)
        self._num_packed += 1
        return data

    def unpack(self, data: bytes) -> Received:
        """Raises BrokenLinkError."""
        number = int.from_bytes(data[:_NUMBER_BYTES])
        if len(data) < _NUMBER_BYTES or number != self._num_unpacked:
            raise BrokenLinkError(f"Message {self._num_unpacked} between server and engine is not the next to arrive.")
        self._num_unpacked += 1
        try:
            return self._decoder.decode(memoryview(data)[_NUMBER_BYTES:])
        except (msgspec.MsgspecError, TwostepError) as error:
            raise BrokenLinkError(f"A message between server and engine cannot be read: {error}") from error


def _has_message(socket: "zmq.Socket[bytes]") -> bool:
    """Asked before each read: finding nothing by an exception takes ten times as long."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _pair(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    return socket
