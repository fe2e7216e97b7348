"""The benchmarks of a command line, one after the other: one, or with a sweep one per load."""

from dataclasses import replace

from loadtest.benchmark import Benchmark
from loadtest.config import Config
from loadtest.findings import warnings_of
from loadtest.progress import Progress


class Campaign:
    """Runs a config. `benchmarks` is valid at any time: it holds those that have begun."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self.config = config
        self.benchmarks: list[Benchmark] = []
        self.is_interrupted = False
        self._progress = progress

    async def run(self) -> None:
        """Raises LoadTestError if a server cannot be reached or goes away."""
        for config in _points(self.config):
            if not self.is_interrupted:
                self.benchmarks.append(Benchmark(config, self._progress))
                await self.benchmarks[-1].run()

    def stop(self) -> None:
        """Ends the benchmark in progress and begins no other; results so far are kept."""
        self.is_interrupted = True
        for benchmark in self.benchmarks[-1:]:
            benchmark.stop()

    @property
    def measured(self) -> list[Benchmark]:
        """The benchmarks that have any result."""
        return [benchmark for benchmark in self.benchmarks if any(result.rounds for result in benchmark.results)]

    @property
    def has_succeeded(self) -> bool:
        """Whether each target answered a request at every load."""
        return all(
            any(summary.num_ok for summary in result.groups.values())
            for benchmark in self.benchmarks
            for result in benchmark.results
        )

    def warnings(self) -> list[str]:
        """Returns the warnings of all benchmarks, each with its load if there are several."""
        return [
            f"{benchmark.config.point}, {warning}" if benchmark.config.point else warning
            for benchmark in self.benchmarks
            for warning in warnings_of(benchmark)
        ]


def _points(config: Config) -> list[Config]:
    """Returns a config for each load. No two share prompts, so each has a seed of its own, with which it can be run
    alone."""
    sweep = config.sweep
    if sweep is None:
        return [config]
    return [
        replace(config, sweep=None, schedule=schedule, seed=config.seed + number, point=f"{sweep.kind} {load:g}")
        for number, (load, schedule) in enumerate(zip(sweep.loads, sweep.schedules, strict=True))
    ]
