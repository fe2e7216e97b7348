"""One client attacks while another streams: `python -m tests.soak.attack [SECONDS]`.

Quiet and attacked by turns (A B A B), for each kind of attack. Prints the stream's gaps; the target is twice the quiet
p99. Figures mean something on an idle machine only.
"""

import argparse
import asyncio
import itertools
import json
import random
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tests.soak.client import connected, request_bytes
from tests.soak.server import eventually, running_server

TARGET = 2.0
NUM_ATTACKERS = 64
ERRORS = (OSError, asyncio.IncompleteReadError)


async def slow_head(port: int) -> None:
    """Sends a head, one line at a time."""
    async with connected(port) as (_, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\n")
        for number in itertools.count():
            writer.write(b"X-%d: y\r\n" % number)
            await writer.drain()
            await asyncio.sleep(0.05)


async def slow_body(port: int) -> None:
    head, body = request_bytes(b'{"prompt": "' + b"x" * 10_000)
    async with connected(port) as (_, writer):
        writer.write(head)
        for byte in body:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.05)


async def stalled_reader(port: int) -> None:
    """Requests streams and reads none of them."""
    parameters = {"prompt": "def", "max_tokens": 200, "stream": True, "logprobs": 20, "ignore_eos": True, "n": 2}
    head, body = request_bytes(json.dumps(parameters).encode())
    reader_socket = socket.socket()
    reader_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader_socket.setblocking(False)
    with reader_socket:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(reader_socket, ("127.0.0.1", port))
        await loop.sock_sendall(reader_socket, head + body)
        await asyncio.sleep(1000)


async def malformed(port: int) -> None:
    """Sends invalid requests, as fast as they are refused."""
    rng = random.Random()
    bodies = [b"[" * 5000, b"{" + b'"a":' * 5000, rng.randbytes(5000), b'{"prompt": 3}', b"[" + b"1," * 20_000 + b"1]"]
    while True:
        head, body = request_bytes(rng.choice(bodies))
        async with connected(port) as (reader, writer):
            writer.write(rng.choice([head, rng.randbytes(300) + b"\r\n\r\n"]) + body)
            await reader.read(-1)


async def large_bodies(port: int) -> None:
    """Sends lists of millions of numbers, of empty lists, and objects of many fields: the slowest bodies to parse for
    their size."""
    for content in itertools.cycle((b"1," * 3_000_000 + b"1", b"[]," * 2_000_000 + b"[]")):
        head, body = request_bytes(b'{"prompt": [' + content + b"]}")
        async with connected(port) as (reader, writer):
            writer.write(head + body)
            await writer.drain()
            await reader.read(-1)


async def connects(port: int) -> None:
    """Opens as many connections as it gets, and sends nothing on any."""
    while True:
        async with connected(port):
            await asyncio.sleep(random.random())


ATTACKS: tuple[tuple[Callable[[int], Awaitable[None]], int], ...] = (
    (slow_head, NUM_ATTACKERS),
    (slow_body, NUM_ATTACKERS),
    (stalled_reader, 4),
    (connects, 500),
    (malformed, 4),
    (large_bodies, 1),
)


async def gaps_ms(port: int, seconds: float) -> list[float]:
    """Returns the gaps between the events of streams that run one after the other."""
    gaps: list[float] = []
    end_s = time.monotonic() + seconds
    parameters = {"prompt": "Return the", "max_tokens": 400, "stream": True, "ignore_eos": True}
    head, body = request_bytes(json.dumps(parameters).encode())
    while time.monotonic() < end_s:
        async with connected(port) as (reader, writer):
            writer.write(head + body)
            await reader.readuntil(b"data: ")
            last_s = time.monotonic()
            with suppress(asyncio.IncompleteReadError):
                while time.monotonic() < end_s:
                    await reader.readuntil(b"data: ")
                    now_s = time.monotonic()
                    gaps.append((now_s - last_s) * 1e3)
                    last_s = now_s
    return gaps


async def persist(attack: Callable[[int], Awaitable[None]], port: int) -> None:
    while True:
        with suppress(*ERRORS):
            await attack(port)
        await asyncio.sleep(0)


async def attacking(attack: Callable[[int], Awaitable[None]], count: int, port: int) -> None:
    await asyncio.gather(*(persist(attack, port) for _ in range(count)))


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


async def compare(attack: Callable[[int], Awaitable[None]], count: int, port: int, seconds: float) -> float:
    """Measures gaps without and with the attack, by turns. The attacker runs in a process of its own, so that its own
    cost does not count."""
    quiet: list[float] = []
    attacked: list[float] = []
    for _ in range(2):
        quiet += await gaps_ms(port, seconds)
        attacker = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.soak.attack", "--as", attack.__name__, str(count), str(port)
        )
        try:
            await asyncio.sleep(2.0)  # until it is at full speed
            attacked += await gaps_ms(port, seconds)
        finally:
            attacker.kill()
            await attacker.wait()
        await asyncio.sleep(1.0)
    ratio = p99(attacked) / p99(quiet)
    print(
        f"{attack.__name__:16} quiet p50 {statistics.median(quiet):6.2f} p99 {p99(quiet):6.2f} ms   "
        f"attacked p50 {statistics.median(attacked):6.2f} p99 {p99(attacked):6.2f} max {max(attacked):7.2f} ms   "
        f"p99 ratio {ratio:.2f}",
        flush=True,
    )
    return ratio


def main() -> int:
    if sys.argv[1:2] == ["--as"]:
        _, _, name, count, port = sys.argv
        attack = next(each for each, _ in ATTACKS if each.__name__ == name)
        asyncio.run(attacking(attack, int(count), int(port)))
    parser = argparse.ArgumentParser(prog="python -m tests.soak.attack", description=__doc__)
    parser.add_argument("seconds", nargs="?", type=float, default=15.0, help="of each turn")
    seconds = parser.parse_args().seconds
    with running_server("--max-num-seqs", "64", "--stall-timeout", "5") as server:
        ratios = [asyncio.run(compare(attack, count, server.port, seconds)) for attack, count in ATTACKS]
        assert eventually(server.is_idle), "something still runs, waits or holds blocks"
    return 0 if max(ratios) <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
