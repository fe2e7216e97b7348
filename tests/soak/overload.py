"""Ten times more than the server can do: `python -m tests.soak.overload [--minutes N]`.

First a closed loop finds its peak, then an open loop asks for a multiple of it. Whoever is accepted must get the first
token within the promised time, whoever is not must be told at once, and the work done must stay that of the peak.
Client, server and engine share the machine: on few cores the client takes from the peak, so give it an idle one.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from loadtest.client import CompletionsClient, WireOptions
from loadtest.event_loop import allow_many_connections, loop_factory
from loadtest.record import Outcome, Record
from loadtest.runner import Send, closed_loop, limited, open_loop
from loadtest.stats import percentile
from loadtest.target import parse_target, resolve
from loadtest.workload import RequestSpec, Shape, poisson_offsets, request_stream
from tests.soak.server import ServerProcess, running_server

MAX_REFUSAL_S = 0.05
MAX_LOSS = 0.05
"""Of the peak's throughput, under overload."""
WARM_SHARE = 0.2
"""Of a phase, before throughput is measured: queues fill first."""


@dataclass(frozen=True)
class Measured:
    """One phase of the load."""

    records: list[Record]
    tokens_per_s: float

    def outcomes(self) -> Counter[Outcome]:
        return Counter(record.reply.outcome for record in self.records)

    def ttft_s(self) -> list[float]:
        return sorted(record.reply.ttft_s for record in self.records if record.reply.ttft_s is not None)

    def refusal_s(self) -> list[float]:
        replies = [record.reply for record in self.records if record.reply.outcome is Outcome.REJECTED]
        return sorted(reply.ended_s - reply.sent_s for reply in replies)

    def num_ok_per_s(self, duration_s: float) -> float:
        return self.outcomes()[Outcome.OK] / duration_s


class Load:
    """Phases of load on one server."""

    def __init__(self, server: ServerProcess, client: CompletionsClient, shape: Shape) -> None:
        self._server = server
        self._client = client
        self._shape = shape
        self._num_phases = 0

    async def peak(self, concurrency: int, duration_s: float) -> Measured:
        specs = limited(self._specs(), None, duration_s)
        return await self._measure(lambda send: closed_loop(send, specs, concurrency), duration_s)

    async def overload(self, rate_per_s: float, duration_s: float) -> Measured:
        specs = limited(self._specs(), None, duration_s)
        offsets_s = poisson_offsets(rate_per_s, "overload")
        return await self._measure(lambda send: open_loop(send, specs, offsets_s), duration_s)

    def _specs(self) -> Any:
        self._num_phases += 1
        return request_stream(self._shape, f"overload/{self._num_phases}")

    async def _measure(self, load: Any, duration_s: float) -> Measured:
        records: list[Record] = []

        async def send(spec: RequestSpec, due_s: float | None) -> None:
            records.append(await self._client(spec, due_s))

        rate, _ = await asyncio.gather(self._tokens_per_s(duration_s), _ended(load, send))
        return Measured(records, rate)

    async def _tokens_per_s(self, duration_s: float) -> float:
        """By the server's own count, while the load is on."""
        await asyncio.sleep(WARM_SHARE * duration_s)
        began_s, before = time.monotonic(), await self._num_tokens()
        await asyncio.sleep((0.95 - WARM_SHARE) * duration_s)
        return (await self._num_tokens() - before) / (time.monotonic() - began_s)

    async def _num_tokens(self) -> float:
        metrics = await asyncio.to_thread(self._server.metrics)
        return metrics["twostep_generation_tokens_total"]


async def _ended(load: Any, send: Send) -> None:
    coroutine: Coroutine[Any, Any, None] = load(send)
    await coroutine


def verdicts(peak: Measured, overload: Measured, bound_s: float) -> list[tuple[bool, str]]:
    """Each promise, kept or not, with what was measured."""
    outcomes, refusals, ttft = overload.outcomes(), overload.refusal_s(), overload.ttft_s()
    others = {outcome.value: count for outcome, count in outcomes.items() if outcome not in (Outcome.OK, "rejected")}
    refused_ms = percentile(refusals, 99) * 1e3 if refusals else 0.0
    ttft_s = percentile(ttft, 99) if ttft else float("inf")
    kept = overload.tokens_per_s / peak.tokens_per_s
    return [
        (not others, f"every request is answered or told 429; others: {others}"),
        (bool(refusals), f"{outcomes[Outcome.OK]} answered, {len(refusals)} refused"),
        (refused_ms < MAX_REFUSAL_S * 1e3, f"refused in p99 {refused_ms:.1f} ms (limit {MAX_REFUSAL_S * 1e3:.0f})"),
        (ttft_s < bound_s, f"first token in p99 {ttft_s:.2f} s (limit {bound_s:g})"),
        (kept > 1 - MAX_LOSS, f"{overload.tokens_per_s:.0f} tokens/s, {kept:.1%} of the peak"),
    ]


async def run(server: ServerProcess, options: argparse.Namespace) -> bool:
    target = await resolve(parse_target("A", server.url))
    client = CompletionsClient(target, WireOptions(model="embedded", timeout_s=600.0))
    load = Load(server, client, Shape(prompt_len=options.prompt_len, output_len=options.output_len))
    overload_s = options.minutes * 60
    peak_s = min(60.0, overload_s / 2)
    peak = await load.peak(2 * options.max_num_seqs, peak_s)
    requests_per_s = peak.num_ok_per_s(peak_s)
    print(f"peak: {peak.tokens_per_s:.0f} tokens/s, {requests_per_s:.1f} requests/s", flush=True)
    overload = await load.overload(options.factor * requests_per_s, overload_s)
    results = verdicts(peak, overload, options.max_queue_time)
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
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    options = parser.parse_args()
    allow_many_connections()
    flags = ("--max-queue-time", str(options.max_queue_time), "--max-num-seqs", str(options.max_num_seqs))
    with running_server(*flags) as server, asyncio.Runner(loop_factory=loop_factory()) as runner:
        is_good = runner.run(run(server, options))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
