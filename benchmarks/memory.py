"""Memory under load: what both processes hold beyond weights and KV cache, and whether it grows."""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import linear_regression

from rich.console import Console

from benchmarks.command import exit_with
from benchmarks.serving import Server, running_server
from loadtest.numbers import positive, positive_number

TARGET_MB = 400
NUM_SAMPLES = 30
SETTLING = 0.5  # share of the run in which the KV cache fills, whose pages are allocated at first use, and code loads


@dataclass(frozen=True, slots=True)
class Sample:
    """The memory of the server process and the engine process at one time."""

    minute: float
    server_mib: float
    engine_mib: float
    fixed_mib: float
    """Memory of the weights and of the KV cache, both as configured."""

    @property
    def excess_mib(self) -> float:
        return self.server_mib + self.engine_mib - self.fixed_mib

    def __str__(self) -> str:
        parts = f"server {self.server_mib:6.1f} MiB, engine {self.engine_mib:7.1f}"
        return f"{self.minute:5.1f} min: {parts}; {self.excess_mib:6.1f} beyond weights and KV cache"


def samples(server: Server, minutes: float) -> Iterator[Sample]:
    """Yields a sample at once, then `NUM_SAMPLES` evenly over `minutes`."""
    info = server.get("/server_info")["engine"]
    fixed = info["weight_bytes"] + info["kv_cache_bytes"]
    began_s = time.monotonic()
    for index in range(NUM_SAMPLES + 1):
        time.sleep(max(0.0, began_s + index * minutes * 60 / NUM_SAMPLES - time.monotonic()))
        minute = (time.monotonic() - began_s) / 60
        yield Sample(minute, server.process.pss_bytes / 2**20, server.engine.pss_bytes / 2**20, fixed / 2**20)


def growth_mib_per_hour(taken: list[Sample]) -> float:
    """Returns the slope of a line through the samples that were taken after the server had settled."""
    settled = [sample for sample in taken if sample.minute >= SETTLING * taken[-1].minute]
    return 60 * linear_regression([s.minute for s in settled], [s.excess_mib for s in settled]).slope


@contextmanager
def load(server: Server, concurrency: int, minutes: float) -> Iterator[None]:
    """Puts a load on the server until the end of this context: `concurrency` streams at once, all of new prompts."""
    command = [sys.executable, "-m", "loadtest", server.url, "--quiet", "--concurrency", str(concurrency)]
    sizes = ["--prompt-len", "256", "--max-tokens", "128", "--duration", str(minutes * 60 + 60)]
    client = subprocess.Popen([*command, *sizes], stdout=subprocess.DEVNULL)
    try:
        yield
        if client.poll() is not None:
            raise SystemExit("the load ended too soon")
    finally:
        client.terminate()
        client.wait(timeout=60)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--model", help="checkpoint directory (default: the embedded model)")
    parser.add_argument("--quantization", default="none", help="as of the server (default: none)")
    parser.add_argument("--concurrency", type=positive, default=8, help="streams at once (default: 8)")
    parser.add_argument("--minutes", type=positive_number, default=2.0, help="of load (default: 2; for growth: 30)")
    options = parser.parse_args(arguments)
    console, taken = Console(), []
    model = [options.model] if options.model else []
    with (
        running_server([*model, "--quantization", options.quantization]) as server,
        load(server, options.concurrency, options.minutes),
    ):
        for sample in samples(server, options.minutes):
            taken.append(sample)
            console.print(str(sample), highlight=False)
    most = max(sample.excess_mib for sample in taken)
    console.print(f"at most {most:.0f} MiB = {most * 2**20 / 1e6:.0f} MB beyond both (target: < {TARGET_MB} MB)")
    console.print(f"growth, the first {SETTLING:.0%} left out: {growth_mib_per_hour(taken):+.1f} MiB per hour")
    return 0


if __name__ == "__main__":
    exit_with(main)
