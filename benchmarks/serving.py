"""What twostep itself costs: start-up, engine overhead per step, server CPU per token, memory over weights and KV."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command import exit_with
from loadtest.numbers import positive

KV_BYTES = 256 << 20
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """A running process, read through /proc."""

    pid: int

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    @property
    def pss_bytes(self) -> int:
        """Proportional set size: resident memory, in which pages shared by two processes count by half."""
        for line in Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("smaps_rollup has no Pss line")

    def children(self) -> list["Process"]:
        path = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [Process(int(pid)) for pid in path.read_text().split()]


@dataclass(frozen=True, slots=True)
class Server:
    """A running twostep server with its trace file."""

    url: str
    process: Process
    trace: Path
    first_token_s: float
    """Time from the start of the process to the first token of a first request."""

    @property
    def engine(self) -> Process:
        return self.process.children()[0]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)


@contextmanager
def running_server(model: list[str]) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.jsonl"
        port = free_port()
        flags = ["--port", str(port), "--trace", str(trace), "--kv-cache-memory-bytes", str(KV_BYTES)]
        started_s = time.monotonic()
        server = subprocess.Popen(
            [sys.executable, "-m", "server", "serve", *model, *flags, "--log-level", "error"], stdout=subprocess.DEVNULL
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for_first_token(url, server)
            yield Server(url, Process(server.pid), trace, time.monotonic() - started_s)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_first_token(url: str, server: subprocess.Popen[bytes]) -> None:
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    while server.poll() is None:
        try:
            urllib.request.urlopen(request, timeout=60).read()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    raise SystemExit("the server ended before its first token")


def put_load(server: Server, concurrency: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "loadtest", server.url, "--concurrency", str(concurrency), "--quiet"]
    sizes = ["--requests", str(concurrency), "--prompt-len", "64", "--max-tokens", "128", "--warmup", "2"]
    output = subprocess.run([*command, *sizes, "--json", "-"], check=True, capture_output=True, text=True).stdout
    document: dict[str, Any] = json.loads(output.splitlines()[-1])
    return document


def steps_since(trace: Path, offset: int) -> list[dict[str, Any]]:
    with trace.open() as lines:
        lines.seek(offset)
        return [json.loads(line) for line in lines.read().splitlines() if line.endswith("}")]


def measure(model: list[str], concurrency: int) -> list[tuple[str, str, str]]:
    """Runs a server under load; returns rows of (what, measured, target)."""
    with running_server(model) as server:
        first_token_s = server.first_token_s
        put_load(server, 4)  # warm
        cpu_before_s = server.process.cpu_s
        tokens_before, offset = generated_tokens(server), server.trace.stat().st_size
        put_load(server, concurrency)
        tokens = generated_tokens(server) - tokens_before
        server_cpu_s = server.process.cpu_s - cpu_before_s
        steps = [step for step in steps_since(server.trace, offset) if step["num_requests"] == concurrency]
        decode = [step for step in steps if step["phase"] == "decode"]
        model_s = sum(step["model_s"] + step["drafting_s"] for step in decode)
        overhead = 1 - model_s / sum(step["duration_s"] for step in decode)
        info = server.get("/server_info")["engine"]
        total = server.process.pss_bytes + server.engine.pss_bytes
        fixed = info["weight_bytes"] + info["kv_cache_bytes"]
    return [
        ("start to first token, kernels compiled", f"{first_token_s:.1f} s", "< 10 s (embedded model)"),
        (f"engine step minus model, {concurrency} streams", f"{overhead:.1%} of the step", "< 10 %"),
        ("server process CPU per token", f"{server_cpu_s / tokens * 1000:.3f} ms", "< 0.2 ms"),
        ("memory of both processes", f"{total / 2**20:.0f} MiB", f"< {(fixed + 400e6) / 2**20:.0f} MiB"),
        ("  of which weights + KV budget", f"{fixed / 2**20:.0f} MiB", ""),
    ]


def generated_tokens(server: Server) -> float:
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("twostep_generation_tokens_total"):
                return float(line.split()[-1])
    raise RuntimeError("twostep_generation_tokens_total is not exported")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--model", help="checkpoint directory (default: the embedded model)")
    parser.add_argument("--concurrency", type=positive, default=32, help="streams at once (default: 32)")
    options = parser.parse_args(arguments)
    rows = measure([options.model] if options.model else [], options.concurrency)
    table = Table("what", "measured", "target", title="What twostep itself costs")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    return 0


if __name__ == "__main__":
    exit_with(main)
