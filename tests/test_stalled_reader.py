"""A client that reads nothing keeps no place from one that waits, and loses nothing when it reads on."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from tests.soak.client import parse_answer, request_bytes
from tests.soak.server import ServerProcess, eventually, running_server

NUM_STREAMS = 16  # so many, with so many tokens, take longer than a reader may fall behind, and more than sockets hold
MINE: dict[str, Any] = {"prompt": "def", "max_tokens": 2000, "n": NUM_STREAMS, "seed": 5, "ignore_eos": True}


def connected(server: ServerProcess) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    return client


def read_to_end(client: socket.socket) -> bytes:
    # The small buffer is acknowledged 40 ms after each of its fills.
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    return b"".join(iter(lambda: client.recv(1 << 16), b""))


@pytest.mark.slow
def test_a_stream_that_nobody_reads_makes_room_and_is_whole_when_it_is_read_on() -> None:
    with running_server("--max-num-seqs", str(NUM_STREAMS)) as server, closing(connected(server)) as client:
        client.sendall(b"".join(request_bytes(json.dumps({**MINE, "stream": True}).encode())))
        assert eventually(lambda: server.metrics()["twostep_requests_running"] == NUM_STREAMS)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(server.complete, prompt="class", max_tokens=1)
            assert eventually(lambda: server.metrics()["twostep_preemptions_total"] > 0)
            other.result()
        whole = server.complete(**MINE)  # which has the places until it ends
        texts = [""] * NUM_STREAMS
        for event in parse_answer(read_to_end(client)).events():
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in whole["choices"]]
