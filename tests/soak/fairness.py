"""One API key floods the server while another asks for one token at a time: `python -m tests.soak.fairness [SECONDS]`.

For each kind of flood, prints the other key's time to first token, quiet and beside the flood; the target is three
times the quiet p99. Then what is left of the flood's own throughput, and how two floods whose keys have weights 2 and 1
share the engine. Such figures mean something on an idle machine only. The exit code is 1 if a stream that others
interrupted is not, token by token, the one that it is alone, or if the other key is refused.

Floods run in processes of their own, so that their own cost does not count.
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from loadtest.event_loop import allow_many_connections
from loadtest.stats import percentile
from tests.soak.client import connected, parse_answer, request_bytes
from tests.soak.kills import answer_of, body_of
from tests.soak.server import ServerProcess, eventually, running_server

MAX_RATIO = 3.0
MIN_SHARE = 0.85
WEIGHTS = {"many": 1, "more": 2, "few": 1}  # by the key's name; the key itself is its name
WARM_UP_S = 2.0  # until a flood is at full speed
PAUSE_S = 0.1
NUM_TOKENS = 200  # of a stream
NUM_STREAMS = 64  # different ones, each of which has one answer
TOKEN_IDS = re.compile(rb'"token_ids":\[([^\]]+)\]')

Body = dict[str, Any]


def streams(number: int) -> Body:
    return body_of(number % NUM_STREAMS, NUM_TOKENS)


def unread(number: int) -> Body:
    return {"prompt": str(number), "max_tokens": 1500, "n": 2, "logprobs": 5, "stream": True, "ignore_eos": True}


def long_prompts(number: int) -> Body:
    return {"prompt": f"{number} def " * 400, "truncate_prompt_tokens": 2000, "max_tokens": 1, "stream": True}


def grammars(number: int) -> Body:
    fields = {f"f{number}_{index}": {"type": "string", "maxLength": 40} for index in range(40)}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    return {"prompt": "{", "max_tokens": 60, "structured_outputs": {"json": schema}, "stream": True}


def short_prompts(number: int) -> Body:
    return {
        "prompt": f"{number}:",
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }


def one_token(number: int) -> Body:
    return {"prompt": f"{number}: return the", "max_tokens": 1, "stream": True}


def one_token_by_a_grammar(number: int) -> Body:
    return {**one_token(number), "structured_outputs": {"choice": [f"a{number}", "b"]}}


FLOODS = {each.__name__: each for each in (streams, unread, long_prompts, grammars, short_prompts)}
COMPARED = {"streams": one_token, "unread": one_token, "long_prompts": one_token, "grammars": one_token_by_a_grammar}
"""What the other key asks for, by the name of the flood."""


@dataclass
class Report:
    """What a flood was given."""

    seconds: float
    num_tokens: int
    answers: dict[str, str]
    """Digests of complete streams, by the number of their body."""
    problems: list[str]


class Flood:
    """Clients of one key that ask again as soon as they have an answer."""

    def __init__(self, port: int, key: str, name: str) -> None:
        self._port, self._key, self._name = port, key, name
        self._numbers: Iterator[int] = itertools.count()
        self._num_tokens = 0
        self._answers: dict[str, str] = {}
        self._problems: list[str] = []

    async def run(self, num_clients: int) -> Report:
        """Runs until standard input ends. Counts tokens from its first line on."""
        client = self._keep_unread if self._name == "unread" else self._ask
        clients = [asyncio.create_task(self._persist(client)) for _ in range(num_clients)]
        await asyncio.to_thread(sys.stdin.readline)
        began_s, num_before = time.monotonic(), self._num_tokens
        await asyncio.to_thread(sys.stdin.read)
        seconds, num_tokens = time.monotonic() - began_s, self._num_tokens - num_before
        if self._name == "streams":
            self._numbers = iter(())
            await asyncio.wait(clients)  # so that those that were interrupted are compared, too
        for task in clients:
            task.cancel()
        return Report(seconds, num_tokens, self._answers, self._problems)

    async def _persist(self, client: Callable[[int], Awaitable[None]]) -> None:
        while (number := next(self._numbers, None)) is not None:
            with suppress(OSError, asyncio.IncompleteReadError):
                await client(number)

    async def _ask(self, number: int) -> None:
        data = b""
        async with connected(self._port) as (reader, writer):
            writer.write(message(FLOODS[self._name](number), self._key))
            while piece := await reader.read(1 << 16):
                data += piece
                self._num_tokens += sum(ids.count(b",") + 1 for ids in TOKEN_IDS.findall(piece))
        if not data.startswith(b"HTTP/1.1 200 "):
            await asyncio.sleep(0.1)
        elif self._name == "streams":
            self._note(str(number % NUM_STREAMS), data)

    def _note(self, index: str, data: bytes) -> None:
        try:
            digest = hashlib.sha256(repr(answer_of(parse_answer(data).events())).encode()).hexdigest()
        except (AssertionError, ValueError) as error:
            self._problems.append(f"stream {index} is not whole: {error}")
            return
        if self._answers.setdefault(index, digest) != digest:
            self._problems.append(f"stream {index} has two answers")

    async def _keep_unread(self, number: int) -> None:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", self._port))
            await loop.sock_sendall(client, message(unread(number), self._key))
            await asyncio.sleep(3600)


def message(body: Body, key: str) -> bytes:
    return b"".join(request_bytes(json.dumps(body).encode(), key=key))


@dataclass
class RunningFlood:
    """A flood in a process of its own; `report` is there when it has ended."""

    process: asyncio.subprocess.Process
    report: Report | None = None

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    @property
    def tokens_per_s(self) -> float:
        assert self.report is not None
        return self.report.num_tokens / self.report.seconds


@asynccontextmanager
async def flooded(port: int, key: str, name: str, num_clients: int) -> AsyncIterator[RunningFlood]:
    """Runs a flood, which is at full speed when this is entered."""
    command = (sys.executable, "-m", "tests.soak.fairness", "--as", name, key, str(num_clients), str(port))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    flood = RunningFlood(process)
    try:
        await asyncio.sleep(WARM_UP_S)
        flood.begin()
        yield flood
        output, _ = await process.communicate(b"")
        flood.report = Report(**json.loads(output))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Soak:
    """All phases, on one server."""

    def __init__(self, server: ServerProcess, options: argparse.Namespace) -> None:
        self._server = server
        self._seconds: float = options.seconds
        self._num_clients: int = options.clients
        self._numbers = itertools.count()
        self.problems: list[str] = []

    async def run(self) -> None:
        alone = await self._alone()
        for name in COMPARED:
            beside = await self._compare(name)
            if name == "streams":
                self._compare_streams(alone, beside)
        await self._share_by_weight()

    async def _alone(self) -> RunningFlood:
        async with flooded(self._server.port, "many", "streams", self._num_clients) as flood:
            await asyncio.sleep(self._seconds)
        return flood

    async def _compare(self, name: str) -> RunningFlood:
        await asyncio.to_thread(eventually, self._server.is_idle)
        quiet = await self._ttft_ms(name)
        async with flooded(self._server.port, "many", name, self._num_clients) as flood:
            beside = await self._ttft_ms(name)
        ratio = percentile(beside, 99) / percentile(quiet, 99)
        for ttft, when in ((quiet, "quiet"), (beside, "beside")):
            print(
                f"{name:12} {when:6} TTFT p50 {median(ttft):7.1f} p99 {percentile(ttft, 99):7.1f} ms, {len(ttft)} times"
            )
        print(f"{name:12} p99 ratio {ratio:.2f}, target {MAX_RATIO:g}", flush=True)
        return flood

    async def _ttft_ms(self, name: str) -> list[float]:
        """Returns the times to first token of the other key, which asks for one thing after the other."""
        values: list[float] = []
        end_s = time.monotonic() + self._seconds
        while time.monotonic() < end_s:
            body = COMPARED[name](next(self._numbers))
            began_s = time.monotonic()
            async with connected(self._server.port) as (reader, writer):
                writer.write(message(body, "few"))
                status = await reader.readline()
                if b" 200 " not in status:
                    self.problems.append(f"{name}: the other key is told {status.decode().strip()}")
                    continue
                await reader.readuntil(b"data: ")
                values.append((time.monotonic() - began_s) * 1e3)
            await asyncio.sleep(PAUSE_S)
        return sorted(values)

    def _compare_streams(self, alone: RunningFlood, beside: RunningFlood) -> None:
        assert alone.report is not None and beside.report is not None
        self.problems += alone.report.problems + beside.report.problems
        expected, given = alone.report.answers, beside.report.answers
        both = expected.keys() & given.keys()
        self.problems += [
            f"stream {each} differs beside the other key" for each in both if expected[each] != given[each]
        ]
        num_preempted = self._server.metrics()["twostep_preemptions_total"]
        print(f"{len(both)} streams compared, {num_preempted:.0f} preemptions")
        share = beside.tokens_per_s / alone.tokens_per_s
        print(f"{beside.tokens_per_s:.0f} tokens/s beside, {share:.0%} of alone, target {MIN_SHARE:.0%}", flush=True)

    async def _share_by_weight(self) -> None:
        port = self._server.port
        floods = (flooded(port, key, "short_prompts", self._num_clients) for key in ("many", "more"))
        async with next(floods) as one, next(floods) as two:
            one.begin()
            await asyncio.sleep(self._seconds)
        print(f"weights 2 and 1: {two.tokens_per_s:.0f} and {one.tokens_per_s:.0f} tokens/s", flush=True)


def flood_main(name: str, key: str, num_clients: str, port: str) -> int:
    allow_many_connections()
    report = asyncio.run(Flood(int(port), key, name).run(int(num_clients)))
    print(json.dumps(report.__dict__))
    return 0


def keys_file(folder: str) -> str:
    path = Path(folder, "keys.yaml")
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in WEIGHTS}
    path.write_text("".join(f'{name}: {{sha256: "{digests[name]}", weight: {WEIGHTS[name]}}}\n' for name in WEIGHTS))
    return str(path)


def main() -> int:
    if sys.argv[1:2] == ["--as"]:
        return flood_main(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", nargs="?", type=float, default=20.0, help="of each phase; 3 for a quick run")
    parser.add_argument("--clients", type=int, default=64, help="of a flood")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        flags = ("--api-keys-file", keys_file(folder), "--max-num-seqs", str(options.max_num_seqs))
        with running_server(*flags) as server:
            soak = Soak(server, options)
            asyncio.run(soak.run())
            if not eventually(server.is_idle):
                soak.problems.append("something still runs, waits or holds blocks")
    print("\n".join(soak.problems[:20]) or "every stream is whole, and the same as alone")
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
