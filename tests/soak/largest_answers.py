"""The largest answers that a request may ask for, while others look: `python -m tests.soak.largest_answers [PASSES]`.

For each kind of answer, prints the longest and the p99 time of `/health` beside it, whose connections ask again and
again, and the most memory that the server took. The target is 50 ms for the p99. Such figures mean something on an idle
machine only. The exit code is 1 if an answer is not whole.

Clients of large answers run in processes of their own, so that their own cost does not count.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.event_loop import allow_many_connections
from loadtest.stats import percentile
from tests.soak.client import connected, request_bytes
from tests.soak.server import ServerProcess, eventually, running_server

MAX_P99_MS = 50.0
PAUSE_S = 0.01
NUM_UNREAD = 64  # streams, of 1,600 tokens each

Body = dict[str, Any]

PROMPTS = [[1 + (number * 7919 + index * 104729) % 2000 for index in range(901)] for number in range(33)]
LARGEST: dict[str, Body] = {
    "prompts": {"prompt": PROMPTS, "max_tokens": 0, "prompt_logprobs": 100},
    "echoes": {"prompt": PROMPTS, "max_tokens": 0, "logprobs": 100, "echo": True},
    "answers": {"prompt": "def", "max_tokens": 1290, "n": 32, "logprobs": 100, "ignore_eos": True},
}
"""Each asks for as many log-probabilities as a request may: 4 million."""
UNREAD: Body = {"prompt": "def", "max_tokens": 1600, "logprobs": 5, "stream": True, "ignore_eos": True}


async def read_largest(name: str, port: int) -> None:
    """Asks for one answer, and prints its size when it is whole."""
    size, end = 0, b""
    async with connected(port) as (reader, writer):
        writer.write(b"".join(request_bytes(json.dumps(LARGEST[name]).encode())))
        head = await reader.readuntil(b"\r\n\r\n")
        while piece := await reader.read(1 << 20):
            size, end = size + len(piece), (end + piece)[-1000:]
    is_whole = head.startswith(b"HTTP/1.1 200 ") and b'"timings"' in end and end.endswith(b"\r\n0\r\n\r\n")
    print(size if is_whole else f"not whole: {head.decode()}{end.decode()}")


async def leave_unread(port: int) -> None:
    """Asks for streams and reads none of them."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_UNREAD):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, b"".join(request_bytes(json.dumps(UNREAD).encode())))
        await asyncio.to_thread(sys.stdin.read)


async def health_ms(port: int, until: "asyncio.Future[Any]") -> list[float]:
    """Returns how long each answer of `/health` took, asked for on one connection, again and again."""
    values: list[float] = []
    async with connected(port) as (reader, writer):
        while not until.done():
            began_s = time.monotonic()
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            await reader.readexactly(length)
            values.append((time.monotonic() - began_s) * 1e3)
            await asyncio.sleep(PAUSE_S)
    return values


def peak_bytes(pid: int, is_reset: bool = False) -> int:
    """Returns the most resident memory that a process had, since the start or the last reset; resets it on demand."""
    status = Path(f"/proc/{pid}/status").read_text()
    if is_reset:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


class Soak:
    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.problems: list[str] = []

    async def quiet(self) -> None:
        self._report("quiet", await health_ms(self._server.port, asyncio.ensure_future(asyncio.sleep(5.0))))

    async def read(self, name: str) -> None:
        process = await self._start(name)
        end = asyncio.ensure_future(process.communicate())
        values = await health_ms(self._server.port, end)
        output, _ = await end
        self._report(name, values, f", {output.decode().strip()} bytes")
        if not output.strip().isdigit():
            self.problems.append(f"{name}: {output.decode()}")

    async def leave_unread(self) -> None:
        process = await self._start("unread")
        await asyncio.sleep(1.0)
        end = asyncio.ensure_future(self._until_computed())
        self._report("unread", await health_ms(self._server.port, end))
        await process.communicate(b"")

    async def _until_computed(self) -> None:
        while (await asyncio.to_thread(self._server.metrics))["twostep_kv_blocks{state=held}"]:
            await asyncio.sleep(0.5)

    async def _start(self, name: str) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "tests.soak.largest_answers", "--as", name, str(self._server.port))
        pipe = asyncio.subprocess.PIPE
        peak_bytes(self._server.process.pid, is_reset=True)
        return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)

    def _report(self, name: str, values: list[float], more: str = "") -> None:
        engine_pid = self._server.engine_pid
        server_mb = peak_bytes(self._server.process.pid) >> 20
        engine_mb = peak_bytes(engine_pid) >> 20 if engine_pid is not None else 0
        print(
            f"{name:8} /health p50 {median(values):5.1f} p99 {percentile(sorted(values), 99):6.1f} "
            f"max {max(values):6.1f} ms of {len(values)}, target p99 {MAX_P99_MS:g}; "
            f"peak memory: server {server_mb} MiB, engine {engine_mb} MiB{more}",
            flush=True,
        )


async def soak(server: ServerProcess, passes: int) -> list[str]:
    run = Soak(server)
    await run.quiet()
    for _ in range(passes):
        for name in LARGEST:
            await run.read(name)
        await run.leave_unread()
    return run.problems


def main() -> int:
    if sys.argv[1:2] == ["--as"]:
        allow_many_connections()
        _, _, name, port = sys.argv
        asyncio.run(leave_unread(int(port)) if name == "unread" else read_largest(name, int(port)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("passes", nargs="?", type=int, default=1)
    passes = parser.parse_args().passes
    with running_server("--max-num-seqs", "64") as server:
        problems = asyncio.run(soak(server, passes))
        if not eventually(server.is_idle):
            problems.append("something still runs, waits or holds blocks")
    print("\n".join(problems) or "every answer is whole")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
