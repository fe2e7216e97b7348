"""Ten times more than the server can do: `python -m tests.soak.overload [--minutes N]`.

A closed loop finds the server's peak, an open loop sends a multiple of it, and a second closed loop shows whether the
machine's speed has changed. Accepted requests must get their first token within the promised time, others must be
refused at once, and throughput must stay that of the peak, per CPU second that neither the crowd nor others took.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from loadtest.event_loop import allow_many_connections, loop_factory
from loadtest.stats import percentile
from loadtest.workload import Shape, poisson_offsets, request_stream
from tests.soak.crowd import Crowd, Reply, closed_loop, open_loop
from tests.soak.server import ServerProcess, cpu_seconds, machine_cpu_seconds, running_server

MAX_REFUSAL_S = 0.05
MAX_LOSS = 0.05
"""Share of the peak's throughput that may be lost under overload."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WARM_SHARE = 0.2
"""Share of a phase before throughput is measured: queues fill first."""


@dataclass(frozen=True)
class Measured:
    """One phase of the load."""

    replies: list[Reply]
    num_tokens_asked: int
    tokens_per_s: float
    cpus: dict[str, float]
    """CPU seconds per second: of server, engine and crowd, and of all other processes."""

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens per CPU second that was left for server and engine."""
        return self.tokens_per_s / (len(os.sched_getaffinity(0)) - self.cpus["crowd"] - self.cpus["others"])

    def outcomes(self) -> Counter[str]:
        return Counter(self._outcome(reply) for reply in self.replies)

    def _outcome(self, reply: Reply) -> str:
        if reply.status == 200:
            return "ok" if b'"completion_tokens":%d,' % self.num_tokens_asked in reply.tail else "incomplete"
        return "refused" if reply.status == 429 else str(reply.status)

    def ttft_s(self) -> list[float]:
        return sorted(reply.first_s - reply.sent_s for reply in self.replies if reply.status == 200)

    def refusal_s(self) -> list[float]:
        return sorted(reply.ended_s - reply.sent_s for reply in self.replies if reply.status == 429)

    def __str__(self) -> str:
        cpus = ", ".join(f"{name} {share:.2f}" for name, share in self.cpus.items())
        of_engine = self.tokens_per_s / self.cpus["engine"]
        per_cpu_s = f"{self.tokens_per_cpu_s:.0f} per CPU second left, {of_engine:.0f} per CPU second of the engine"
        return f"{self.tokens_per_s:.0f} tokens/s, {per_cpu_s}; CPUs: {cpus}"


class Load:
    """Phases of load on one server, by one crowd."""

    def __init__(self, server: ServerProcess, shape: Shape) -> None:
        self._server = server
        self._num_tokens_asked = shape.output_len
        self._crowd = Crowd(server.port, messages(shape))

    async def peak(self, num_clients: int, duration_s: float) -> Measured:
        return await self._measure(closed_loop(self._crowd, num_clients, duration_s), duration_s)

    async def overload(self, rate_per_s: float, duration_s: float) -> Measured:
        offsets_s = poisson_offsets(rate_per_s, "overload")
        return await self._measure(open_loop(self._crowd, offsets_s, duration_s), duration_s)

    async def _measure(self, load: Coroutine[Any, Any, list[Reply]], duration_s: float) -> Measured:
        (tokens_per_s, cpus), replies = await asyncio.gather(self._rates(duration_s), load)
        return Measured(replies, self._num_tokens_asked, tokens_per_s, cpus)

    async def _rates(self, duration_s: float) -> tuple[float, dict[str, float]]:
        """Measures tokens, by the server's own count, and CPU seconds, each per second while the load is on."""
        await asyncio.sleep(WARM_SHARE * duration_s)
        began_s, num_before, cpu_before = time.monotonic(), await self._num_tokens(), self._cpu_s()
        await asyncio.sleep((0.95 - WARM_SHARE) * duration_s)
        took_s = time.monotonic() - began_s
        cpus = {name: (cpu_s - cpu_before[name]) / took_s for name, cpu_s in self._cpu_s().items()}
        return (await self._num_tokens() - num_before) / took_s, cpus

    async def _num_tokens(self) -> float:
        metrics = await asyncio.to_thread(self._server.metrics)
        return metrics["twostep_generation_tokens_total"]

    def _cpu_s(self) -> dict[str, float]:
        assert self._server.engine_pid is not None
        pids = {"crowd": os.getpid(), "server": self._server.process.pid, "engine": self._server.engine_pid}
        used_s = {name: cpu_seconds(pid) for name, pid in pids.items()}
        return {**used_s, "others": machine_cpu_seconds() - sum(used_s.values())}


def messages(shape: Shape) -> Iterator[bytes]:
    for spec in request_stream(shape, "overload"):
        body = {"prompt": spec.prompt, "max_tokens": spec.max_tokens, "temperature": 0, "ignore_eos": True}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        content = json.dumps({**body, **options}).encode()
        yield b"%sContent-Length: %d\r\n\r\n%s" % (HEAD, len(content), content)


def verdicts(peaks: list[Measured], overload: Measured, bound_s: float) -> list[tuple[bool, str]]:
    """Returns whether each promise was kept, with a text that says what was measured."""
    outcomes, refusals, ttft = overload.outcomes(), overload.refusal_s(), overload.ttft_s()
    others = {outcome: count for outcome, count in outcomes.items() if outcome not in ("ok", "refused")}
    refused_ms = percentile(refusals, 99) * 1e3 if refusals else 0.0
    ttft_s = percentile(ttft, 99) if ttft else float("inf")
    of_peak = overload.tokens_per_s / fmean(peak.tokens_per_s for peak in peaks)
    kept = overload.tokens_per_cpu_s / fmean(peak.tokens_per_cpu_s for peak in peaks)
    return [
        (not others, f"every request is answered or told 429; others: {others}"),
        (bool(refusals), f"{outcomes['ok']} answered, {len(refusals)} refused"),
        (refused_ms < MAX_REFUSAL_S * 1e3, f"refused in p99 {refused_ms:.1f} ms (limit {MAX_REFUSAL_S * 1e3:.0f})"),
        (ttft_s < bound_s, f"first token in p99 {ttft_s:.2f} s (limit {bound_s:g})"),
        (kept > 1 - MAX_LOSS, f"{of_peak:.1%} of the peak's tokens/s, {kept:.1%} of those per CPU second left"),
    ]


async def run(server: ServerProcess, options: argparse.Namespace) -> bool:
    load = Load(server, Shape(prompt_len=options.prompt_len, output_len=options.output_len))
    overload_s = options.minutes * 60
    peak_s = min(60.0, overload_s / 2)
    peaks = [await load.peak(2 * options.max_num_seqs, peak_s)]
    print(f"peak: {peaks[0]}", flush=True)
    overload = await load.overload(options.factor * peaks[0].tokens_per_s / options.output_len, overload_s)
    print(f"overload: {overload}", flush=True)
    peaks.append(await load.peak(2 * options.max_num_seqs, peak_s))
    print(f"peak: {peaks[1]}", flush=True)
    results = verdicts(peaks, overload, options.max_queue_time)
    results.append((server.process.poll() is None, "the server is alive"))
    for is_kept, text in results:
        print("ok    " if is_kept else "BROKEN", text)
    return all(is_kept for is_kept, _ in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="of overload")
    parser.add_argument("--factor", type=float, default=10.0, help="times the peak's rate of requests")
    parser.add_argument("--max-queue-time", type=float, default=10.0, help="the promise, in seconds")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--num-threads", type=int, help="of the engine")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    options = parser.parse_args()
    allow_many_connections()
    flags = ["--max-queue-time", str(options.max_queue_time), "--max-num-seqs", str(options.max_num_seqs)]
    flags += [] if options.num_threads is None else ["--num-threads", str(options.num_threads)]
    with running_server(*flags) as server, asyncio.Runner(loop_factory=loop_factory()) as runner:
        is_good = runner.run(run(server, options))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
