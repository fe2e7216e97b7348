"""The whole measurement: every target, every round, one run at a time."""

import asyncio
import string
import time
from dataclasses import replace

from loadtest.client import Sender, StreamingClient
from loadtest.config import Config
from loadtest.discovery import find, first_model, http_client
from loadtest.loads import Load
from loadtest.metrics import read_snapshot, settled_snapshot
from loadtest.progress import Progress
from loadtest.record import Outcome
from loadtest.results import RunResult, RunSink, TargetResult
from loadtest.target import Target, parse_target
from loadtest.workload import RequestSpec, WorkloadKind


class Benchmark:
    """Runs a config. `results` is valid at any time, also after `stop` or an error: it holds what was measured so
    far."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self.config = config
        self.results: list[TargetResult] = []
        self.is_interrupted = False
        self._progress = progress
        self._running: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Ends the run in progress: requests in flight are cut, results so far are kept."""
        self.is_interrupted = True
        if self._running is not None:
            self._running.cancel()

    async def run(self) -> None:
        """Runs all rounds, alternating targets: A B A B. Raises LoadTestError if a server cannot be reached or goes
        away."""
        targets = [parse_target(_label(number), url) for number, url in enumerate(self.config.urls)]
        self._running = asyncio.create_task(self._run_all(targets))
        try:
            await self._running
        except asyncio.CancelledError:
            if not self.is_interrupted:
                raise

    async def _run_all(self, targets: list[Target]) -> None:
        for target in targets:
            self.results.append(await self._discover(target))
        for round_number in range(self.config.rounds):
            for result in self.results:
                await self._run_once(result, round_number)

    async def _discover(self, target: Target) -> TargetResult:
        headers = self.config.wire.request_headers()
        found = await find(target, headers, self.config.wait_s)
        model = self.config.wire.model
        if not model:
            async with http_client(found, headers) as client:
                model = await first_model(client)
        return TargetResult(found, model)

    async def _run_once(self, result: TargetResult, round_number: int) -> None:
        config = self.config
        wire = replace(config.wire, model=result.model)
        sender = StreamingClient(result.target, wire, config.shape.kind is WorkloadKind.AGENT_SESSIONS)
        # No two runs share a prompt: a prefix cache would make the later one look fast. Arrivals are the same for all.
        seed = f"{config.seed}/{round_number}/{result.target.label}"
        load = Load(config, seed, arrivals_seed=f"{config.seed}/{round_number}")
        await self._warm_up(result, sender, load.warm_up())
        sink = RunSink(config.targets, result, sender, self._progress)
        async with http_client(result.target, wire.request_headers()) as client:
            before = await settled_snapshot(lambda: read_snapshot(client))
            where = f"{result.target.label}, {config.point}," if config.point else result.target.label
            self._progress.begin(f"{where} round {round_number + 1}/{config.rounds}", config.schedule)
            began_cpu_s, began_s = time.process_time(), time.perf_counter()
            try:
                await _all_sent(load, sink)
            finally:
                cpu_s, wall_s = time.process_time() - began_cpu_s, time.perf_counter() - began_s
                run, after = RunResult(sink.groups, cpu_s, wall_s, sink.num_in_flight, sink.turns), None
                try:
                    after = await settled_snapshot(lambda: read_snapshot(client))
                finally:  # the run is recorded even if reading the counters is interrupted
                    result.end_run(run, before, after)

    async def _warm_up(self, result: TargetResult, send: Sender, specs: list[RequestSpec]) -> None:
        """Sends requests that are in no result; those that fail are counted."""
        for record in await asyncio.gather(*map(send, specs)):
            if record.reply.outcome is not Outcome.OK:
                result.warmup_failures.append(f"{record.reply.outcome}: {record.reply.message}")


async def _all_sent(load: Load, sink: RunSink) -> None:
    try:
        await load.run(sink.send)
    except ExceptionGroup:
        if sink.gone is None:
            raise
        raise sink.gone from None


def _label(number: int) -> str:
    """Returns the label of a target: A, B, ... Z, then AA, AB, ..."""
    letters = string.ascii_uppercase
    return letters[number] if number < len(letters) else _label(number // len(letters) - 1) + letters[number % 26]
