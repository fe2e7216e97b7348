"""Requests as bytes on a socket, and their responses: for what no HTTP client would send."""

import json
import socket
from contextlib import closing
from typing import Any

from tests.server.live_server import LiveServer

GET = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def body_of(**parameters: Any) -> bytes:
    return json.dumps({"prompt": "Hi", **parameters}).encode()


def post(body: bytes) -> bytes:
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


def answer_to(server: LiveServer, *data: bytes) -> bytes:
    """Returns all that the server sends until it closes the connection."""
    with closing(server.connect()) as connection:
        send(connection, *data)
        return rest_of(connection)


def send(connection: socket.socket, *data: bytes) -> None:
    try:
        for part in data:
            connection.sendall(part)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server has closed the connection


def rest_of(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def status_and_code(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def is_open(connection: socket.socket) -> bool:
    """Tells whether the connection still answers."""
    send(connection, GET)
    answer = b""
    while not answer.endswith(b"}"):
        try:
            part = connection.recv(65536)
        except ConnectionResetError:
            return False
        if not part:
            return False
        answer += part
    return answer.startswith(b"HTTP/1.1 200")


def num_connections(server: LiveServer) -> int:
    return len(server.server.server_state.connections)
