"""The command line: flags to a Config, signals, exit codes, and what goes to stdout, stderr and files.

Exit codes: 0 measured; 1 nothing succeeded, or --strict and a warning; 2 a command line that makes no sense, a server
that cannot be reached or goes away, or a file that cannot be written; 130 interrupted.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence

from rich.console import Console

from loadtest.arguments import parse_config
from loadtest.benchmark import Benchmark
from loadtest.document import document
from loadtest.errors import LoadTestError, UsageError
from loadtest.event_loop import allow_many_connections, loop_factory
from loadtest.findings import warnings_of
from loadtest.progress import NoProgress, ProgressBar
from loadtest.report import print_report

_WIDTH_WITHOUT_TERMINAL = 120
_INTERRUPTED = 130
_STDOUT = "-"  # as the name of a file


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    try:
        config = parse_config(arguments)
        _check_writable(config.json_file)
    except LoadTestError as error:
        return _fail(error)
    show_progress = sys.stderr.isatty() and not config.is_quiet
    with ProgressBar(Console(stderr=True)) if show_progress else contextlib.nullcontext(NoProgress()) as progress:
        benchmark = Benchmark(config, progress)
        error_sentence = _run(benchmark)
    return _finish(benchmark, error_sentence)


def _check_writable(path: str | None) -> None:
    """Raises UsageError if the file cannot be written. An existing file is left unchanged, and no new one is left
    behind, since the run may fail."""
    if path is None or path == _STDOUT:
        return
    is_new = not os.path.exists(path)
    try:
        open(path, "a").close()
        if is_new:
            os.unlink(os.path.realpath(path))  # a link may lead to it
    except OSError as error:
        raise UsageError(f"--json: cannot write {path}: {error.strerror}") from None


def _run(benchmark: Benchmark) -> str | None:
    """Runs the benchmark. Returns why it ended early, or None if it did not."""
    try:
        allow_many_connections()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_run_until_interrupted(benchmark))
    except LoadTestError as error:
        return str(error)
    except KeyboardInterrupt:
        return "interrupted twice"
    return None


async def _run_until_interrupted(benchmark: Benchmark) -> None:
    """Runs the benchmark; the first Ctrl-C stops the load and keeps the results, the second one ends the program."""
    loop = asyncio.get_running_loop()

    def on_interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        benchmark.stop()

    # Signal handlers are not available on Windows and outside the main thread.
    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
    await benchmark.run()


def _finish(benchmark: Benchmark, error_sentence: str | None) -> int:
    config = benchmark.config
    has_measured = any(result.rounds for result in benchmark.results)
    if not has_measured:
        return _INTERRUPTED if benchmark.is_interrupted else _fail(error_sentence or "nothing was measured")
    warnings = warnings_of(benchmark)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL)
    print_report(console, benchmark, warnings)
    if config.json_file is not None:
        text = json.dumps(document(benchmark, warnings, error_sentence), allow_nan=False)
        if problem := _write(config.json_file, text):
            return _fail(problem)
    if benchmark.is_interrupted:
        return _INTERRUPTED
    if error_sentence is not None:
        return _fail(error_sentence)
    has_succeeded = all(any(summary.num_ok for summary in result.groups.values()) for result in benchmark.results)
    return 0 if has_succeeded and not (config.is_strict and warnings) else 1


def _write(path: str, text: str) -> str:
    """Writes the text. Returns why it went to stdout instead of the file, or an empty string."""
    problem = ""
    if path != _STDOUT:
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"{text}\n")
            return ""
        except OSError as error:
            problem = f"--json: cannot write {path}, so the document is on stdout: {error.strerror}"
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    return problem


def _fail(error: LoadTestError | str) -> int:
    sys.stderr.write(f"loadtest: {error}\n")
    return 2
