"""Runs the rounds: each server is started, measured on all its scenarios and ended, one after the other."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any

from benchmarks.peers.machine import ForeignCpu, foreign_share
from benchmarks.peers.plan import Plan, ServerPlan
from benchmarks.peers.processes import ServerProcess, StartFailed, running
from benchmarks.peers.uneven import uneven
from loadtest.benchmark import Benchmark
from loadtest.config import Config
from loadtest.document import document
from loadtest.errors import LoadTestError
from loadtest.findings import warnings_of
from loadtest.progress import Progress
from loadtest.results import RunResult
from loadtest.stats import Summary

_IDLE_CHECK_S = 1.0
_VERSION_TIMEOUT_S = 120.0
_CRASH_WAIT_S = 0.5  # after a failed request, for the end of the process that may have caused it
_NO_RESULT = RunResult({}, 0.0, 0.0, 0)  # stands for a round without a result, so that rounds stay paired


@dataclass(frozen=True)
class Run:
    """One scenario on one server in one round. A run with a `problem` is left out of the comparison."""

    round_number: int
    scenario: str
    problem: str = ""
    last_words: str = ""  # the end of the server's log, where there is a problem
    warnings: tuple[str, ...] = ()
    foreign_cpu_share: float | None = None  # unknown where the server ended: its own CPU time was lost with it
    result: RunResult | None = None
    loadtest: dict[str, Any] | None = None  # the load test's own document

    @property
    def description(self) -> str:
        """The run's problem, or its throughput, for a line of progress."""
        if self.problem or self.result is None:
            return self.problem
        rates = ", ".join(
            f"{_format_rate(summary.token_rate(summary.completion_tokens))} output tok/s of {name}"
            f" ({summary.num_ok}/{summary.num_requests} ok)"
            for name, summary in sorted(self.result.groups.items())
        )
        return f"{rates}; others took {self.foreign_cpu_share or 0:.1%} of the CPU"


def _format_rate(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:.4g}"


@dataclass
class ServerResult:
    """All runs of one server so far."""

    plan: ServerPlan
    version: str = ""
    starts_s: list[float] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def rounds(self, scenario: str, num_rounds: int) -> list[RunResult]:
        """Returns one result per round, with only the groups that have a successful request."""
        found = [_NO_RESULT] * num_rounds
        for run in self.runs:
            if run.scenario == scenario and not run.problem and run.result is not None:
                groups = {name: summary for name, summary in run.result.groups.items() if summary.num_ok}
                found[run.round_number] = replace(run.result, groups=groups)
        return found


class Comparison:
    """Carries out a plan. `results` is valid at any time: it holds what was measured so far."""

    def __init__(
        self,
        plan: Plan,
        logs: Path,
        report: Callable[[str], object],
        progress: Callable[[], AbstractContextManager[Progress]],
        on_turn: Callable[[], object],
    ) -> None:
        """`report` prints a line, `progress` makes the progress bar of one run.

        `on_turn` is called after each server's turn.
        """
        self.plan = plan
        self.results = [ServerResult(server) for server in plan.servers]
        self.idle_foreign_cpu_share: float | None = None
        self._logs = logs
        self._report = report
        self._progress = progress
        self._on_turn = on_turn

    async def run(self) -> None:
        """Runs all rounds. When it is cancelled, it ends the running server first."""
        for result in self.results:
            result.version = "" if result.plan.skipped else await _version(result.plan)
        self.idle_foreign_cpu_share = await foreign_share(_IDLE_CHECK_S)
        self._report(f"before anything is started, others take {self.idle_foreign_cpu_share:.1%} of the CPU")
        by_name = {result.plan.name: result for result in self.results}
        for round_number, turn in enumerate(self.plan.turns()):
            for server in turn:
                await self._turn(by_name[server.name], round_number)
                self._on_turn()

    async def _turn(self, result: ServerResult, round_number: int) -> None:
        """Adds one run per scenario of a server, also where it cannot be started or crashes."""
        left = list(result.plan.scenarios)
        while left:
            await self._one_start(result, round_number, left)

    async def _one_start(self, result: ServerResult, round_number: int, left: list[str]) -> None:
        """Starts the server once, and removes the scenarios that are done with from `left`, which is not empty.

        Those are the scenarios up to the first one with a problem, since abandoned requests may still run on that
        server; or all of them, where it cannot be started or has crashed.
        """
        plan, problem, last_words = result.plan, "", ""
        log = self._logs / f"{re.sub(r'[^A-Za-z0-9.-]', '_', plan.name)}-{round_number + 1}-{left[0]}.log"
        try:
            async with running(plan, log) as server:
                try:
                    result.starts_s.append(await self._ready_after_s(server, plan, round_number))
                    while left and not server.why_ended:
                        run = await self._measure(server, plan, left.pop(0), round_number)
                        self._add(result, run)
                        _end_if_cancelled()
                        if run.problem:
                            break
                    problem = f"the server had ended: {server.why_ended}" if server.why_ended else ""
                finally:
                    last_words = server.log_tail()
                    self._report(f"{self._title(plan, round_number)}: ending")
        except StartFailed as error:
            problem = str(error)
        while problem and left:
            self._add(result, Run(round_number, left.pop(0), problem, last_words))

    def _add(self, result: ServerResult, run: Run) -> None:
        result.runs.append(run)
        self._report(f"{self._title(result.plan, run.round_number)}, {run.scenario}: {run.description}")

    async def _ready_after_s(self, server: ServerProcess, plan: ServerPlan, round_number: int) -> float:
        self._report(f"{self._title(plan, round_number)}: starting")
        began_s = time.monotonic()
        await server.wait_until_ready()
        ready_s = time.monotonic() - began_s
        self._report(f"{self._title(plan, round_number)}: ready after {ready_s:.1f} s")
        return ready_s

    async def _measure(self, server: ServerProcess, plan: ServerPlan, scenario: str, round_number: int) -> Run:
        config = self.plan.config(plan, scenario, round_number, server.url)
        foreign = ForeignCpu(lambda: server.family)
        with self._progress() as progress:
            benchmark, problem = await _load(config, self.plan.limit_s, progress)
        share: float | None = foreign.share()
        result = next((target.rounds[0] for target in benchmark.results if target.rounds), None)
        groups: Mapping[str, Summary] = {} if result is None else result.groups
        if not problem and not any(summary.num_ok for summary in groups.values()):
            problem = "no request succeeded"
        if problem or any(summary.num_ok < summary.num_requests for summary in groups.values()):
            await server.ended(_CRASH_WAIT_S)
        if server.why_ended:
            problem, share = f"the server ended: {server.why_ended}", None
        warnings = [sentence.partition(": ")[2] for sentence in warnings_of(benchmark)]
        warnings += uneven(groups, config.wire.ignore_eos)
        loadtest_document = document(benchmark, warnings, problem or None)
        last_words = server.log_tail() if problem else ""
        return Run(round_number, scenario, problem, last_words, tuple(warnings), share, result, loadtest_document)

    def _title(self, plan: ServerPlan, round_number: int) -> str:
        return f"[{round_number + 1}/{self.plan.rounds}] {plan.name}"


def _end_if_cancelled() -> None:
    """Raises CancelledError if the task was cancelled while the time limit stopped the load, which swallows it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _load(config: Config, limit_s: float, progress: Progress) -> tuple[Benchmark, str]:
    """Runs the load; returns what was measured, and why it is incomplete (empty if it is not)."""
    benchmark = Benchmark(config, progress)
    limit = asyncio.get_running_loop().call_later(limit_s, benchmark.stop)
    try:
        await benchmark.run()
    except LoadTestError as error:
        return benchmark, str(error)
    finally:
        limit.cancel()
    return benchmark, f"not finished in {limit_s:g} s" if benchmark.is_interrupted else ""


async def _version(plan: ServerPlan) -> str:
    """Returns the output of the server's version command in one line; empty without such a command, or if it fails."""
    if not plan.version:
        return ""
    try:
        process = await asyncio.create_subprocess_exec(
            *plan.version_arguments(), env=plan.variables(0), stdin=DEVNULL, stdout=PIPE, stderr=STDOUT
        )
    except OSError:
        return ""
    try:
        async with asyncio.timeout(_VERSION_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return " ".join(output.decode(errors="replace").split())[:200] if process.returncode == 0 else ""
