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
from loadtest.campaign import Campaign
from loadtest.document import document
from loadtest.errors import LoadTestError, UsageError
from loadtest.event_loop import allow_many_connections, loop_factory
from loadtest.help_text import PROGRAM
from loadtest.progress import NoProgress, ProgressBar
from loadtest.report import print_report, title_of
from loadtest.sweep.document import sweep_document
from loadtest.sweep.plot import plot
from loadtest.sweep.table import print_sweep

_WIDTH_WITHOUT_TERMINAL = 120
_INTERRUPTED = 130
_STDOUT = "-"  # as the name of a file


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Runs the program, under the name that its help and its errors tell; returns its exit code."""
    try:
        config = parse_config(arguments, program)
        _check_writable("--json", config.json_file)
        _check_writable("--plot", config.sweep.plot_file if config.sweep else None)
    except LoadTestError as error:
        return _fail(error, program)
    show_progress = sys.stderr.isatty() and not config.is_quiet
    with ProgressBar(Console(stderr=True)) if show_progress else contextlib.nullcontext(NoProgress()) as progress:
        campaign = Campaign(config, progress)
        error_sentence = _run(campaign)
    return _finish(campaign, error_sentence, program)


def _check_writable(flag: str, path: str | None) -> None:
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
        raise UsageError(f"{flag}: cannot write {path}: {error.strerror}") from None


def _run(campaign: Campaign) -> str | None:
    """Runs the campaign. Returns why it ended early, or None if it did not."""
    try:
        allow_many_connections()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_run_until_interrupted(campaign))
    except LoadTestError as error:
        return str(error)
    except KeyboardInterrupt:
        return "interrupted twice"
    return None


async def _run_until_interrupted(campaign: Campaign) -> None:
    """Runs the campaign; the first Ctrl-C stops the load and keeps the results, the second one ends the program."""
    loop = asyncio.get_running_loop()

    def on_interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        campaign.stop()

    # Signal handlers are not available on Windows and outside the main thread.
    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
    await campaign.run()


def _finish(campaign: Campaign, error_sentence: str | None, program: str) -> int:
    if not campaign.measured:
        return _INTERRUPTED if campaign.is_interrupted else _fail(error_sentence or "nothing was measured", program)
    warnings = campaign.warnings()
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL)
    if campaign.config.sweep is None:
        print_report(console, campaign.benchmarks[0], warnings)
    else:
        print_sweep(console, campaign, title_of(campaign.config), warnings)
    if problem := _write_files(campaign, warnings, error_sentence):
        return _fail(problem, program)
    if campaign.is_interrupted:
        return _INTERRUPTED
    if error_sentence is not None:
        return _fail(error_sentence, program)
    return 0 if campaign.has_succeeded and not (campaign.config.is_strict and warnings) else 1


def _write_files(campaign: Campaign, warnings: list[str], error_sentence: str | None) -> str:
    """Writes the plot and the document that were asked for. Returns why one could not be written, else nothing."""
    config, problem = campaign.config, ""
    if config.sweep is not None and config.sweep.plot_file is not None:
        try:
            with open(config.sweep.plot_file, "w", encoding="utf-8") as file:
                file.write(plot(campaign, title_of(config)))
        except OSError as error:
            problem = f"--plot: cannot write {config.sweep.plot_file}: {error.strerror}"
    if config.json_file is None:
        return problem
    if config.sweep is None:
        found = document(campaign.benchmarks[0], warnings, error_sentence)
    else:
        found = sweep_document(campaign, warnings, error_sentence)
    return _write(config.json_file, json.dumps(found, allow_nan=False)) or problem


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


def _fail(error: LoadTestError | str, program: str) -> int:
    sys.stderr.write(f"{program.removeprefix('python -m ')}: {error}\n")
    return 2
