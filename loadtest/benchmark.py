"""The whole measurement: every target, every round, one run at a time."""

import asyncio
import string
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from typing import Any

from loadtest.client import Sender, StreamingClient
from loadtest.config import Config
from loadtest.datasets.entries import dataset_stream
from loadtest.discovery import find, first_model, http_client
from loadtest.metrics import read_snapshot, settled_snapshot
from loadtest.progress import Progress
from loadtest.record import Outcome
from loadtest.results import RunResult, RunSink, TargetResult
from loadtest.runner import closed_loop, limited, long_among_decoders, open_loop
from loadtest.target import Target, parse_target
from loadtest.workload import RequestSpec, WorkloadKind, long_stream, poisson_offsets, request_stream

_MAX_WARMUP_TOKENS = 16

Load = Callable[[], Coroutine[Any, Any, None]]


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
        sender = StreamingClient(result.target, wire)
        # No two runs share a prompt: a prefix cache would make the later one look fast. Arrivals are the same for all.
        seed = f"{config.seed}/{round_number}/{result.target.label}"
        main, longs = self._main_stream(seed), long_stream(config.shape, seed)
        # The requests of a file are all measured, so its warm-up has prompts with a mark of their own.
        warming = main if config.dataset is None else self._main_stream(f"{seed}/warm-up", is_salted=True)
        await self._warm_up(result, sender, warming, longs)
        sink = RunSink(config.targets, result, sender, self._progress)
        load = self._load(sink, main, longs, f"{config.seed}/{round_number}")
        async with http_client(result.target, wire.request_headers()) as client:
            before = await settled_snapshot(lambda: read_snapshot(client))
            self._progress.begin(f"{result.target.label} round {round_number + 1}/{config.rounds}", config.schedule)
            began_cpu_s, began_s = time.process_time(), time.perf_counter()
            try:
                await _all_sent(load(), sink)
            finally:
                cpu_s, wall_s = time.process_time() - began_cpu_s, time.perf_counter() - began_s
                run, after = RunResult(sink.groups, cpu_s, wall_s, sink.num_in_flight), None
                try:
                    after = await settled_snapshot(lambda: read_snapshot(client))
                finally:  # the run is recorded even if reading the counters is interrupted
                    result.end_run(run, before, after)

    def _main_stream(self, seed: str, is_salted: bool | None = None) -> Iterator[RequestSpec]:
        config = self.config
        if config.dataset is None:
            return request_stream(config.shape, seed)
        return dataset_stream(config.dataset, config.shape, seed, config.is_salted if is_salted is None else is_salted)

    async def _warm_up(
        self, result: TargetResult, send: Sender, main: Iterator[RequestSpec], longs: Iterator[RequestSpec]
    ) -> None:
        """Sends the first requests of the same streams, with short outputs and in no result; with long-among-decoders,
        one of them is long."""
        num = self.config.schedule.num_warmup
        num_longs = min(num, 1) if self.config.shape.kind is WorkloadKind.LONG_AMONG_DECODERS else 0
        drawn = [*islice(main, num - num_longs), *islice(longs, num_longs)]
        specs = [replace(spec, max_tokens=min(spec.max_tokens, _MAX_WARMUP_TOKENS)) for spec in drawn]
        for record in await asyncio.gather(*map(send, specs)):
            if record.reply.outcome is not Outcome.OK:
                result.warmup_failures.append(f"{record.reply.outcome}: {record.reply.message}")

    def _load(
        self, sink: RunSink, main: Iterator[RequestSpec], longs: Iterator[RequestSpec], arrivals_seed: str
    ) -> Load:
        schedule = self.config.schedule
        num_streams = schedule.concurrency or 1
        specs = limited(main, schedule.num_requests, schedule.duration_s)
        if self.config.shape.kind is WorkloadKind.LONG_AMONG_DECODERS:
            return partial(long_among_decoders, sink.send, specs, longs, num_streams, schedule.long_every_s)
        offsets_s: Iterator[float]
        if self.config.dataset is not None and schedule.keeps_arrivals:
            offsets_s = self.config.dataset.offsets_s(schedule.speedup)
        elif schedule.rate_per_s is not None:
            offsets_s = poisson_offsets(schedule.rate_per_s, arrivals_seed)
        else:
            return partial(closed_loop, sink.send, specs, num_streams)
        if (duration_s := schedule.duration_s) is not None:
            offsets_s = takewhile(lambda offset_s: offset_s < duration_s, offsets_s)
        return partial(open_loop, sink.send, specs, offsets_s, schedule.concurrency)


async def _all_sent(load: Coroutine[Any, Any, None], sink: RunSink) -> None:
    try:
        await load
    except ExceptionGroup:
        if sink.gone is None:
            raise
        raise sink.gone from None


def _label(number: int) -> str:
    """Returns the label of a target: A, B, ... Z, then AA, AB, ..."""
    letters = string.ascii_uppercase
    return letters[number] if number < len(letters) else _label(number // len(letters) - 1) + letters[number % 26]
