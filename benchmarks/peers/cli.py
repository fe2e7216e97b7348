"""The command line of the comparison: from a file of servers to tables, a JSON document and a plot.

Signals end the server that runs. Exit codes: 0 all was measured; 1 something could not be; 2 a command line or file
that makes no sense; 130 interrupted.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.peers.comparison import Comparison
from benchmarks.peers.document import document
from benchmarks.peers.plan import Plan, PlanOptions, read_plan
from benchmarks.peers.plot import check_plot, draw
from benchmarks.peers.report import print_report
from loadtest.config import SCENARIOS
from loadtest.errors import LoadTestError, UsageError
from loadtest.event_loop import allow_many_connections, loop_factory
from loadtest.numbers import positive
from loadtest.progress import NoProgress, Progress, ProgressBar

_WIDTH_WITHOUT_TERMINAL = 140
_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_EPILOG = """\
The file says how each server is started; benchmarks/peers.toml is one, with how to install each. In a command,
${PORT} is a free port, ${PYTHON} is this Python, and any other ${NAME} comes from the environment: a server whose
variables are not set is left out. One server runs at a time. A round is: each server started, measured on all its
scenarios, and ended. Ratios are between runs of the same round, so compare by these where the machine is noisy.
Nothing else should run: the CPU share of other processes is shown beside each number.

examples:
  what would be done, and what is missing
    MODEL=Qwen/Qwen2.5-0.5B python -m benchmarks.peers benchmarks/peers.toml --dry-run
  does everything start and answer: two short requests of one scenario
    python -m benchmarks.peers my.toml --rounds 1 --scenario S1 -- --requests 2 --max-tokens 8
  all of it, with a document and a picture
    python -m benchmarks.peers my.toml --json peers.json --plot peers.svg
  two of the servers, three rounds of two scenarios
    python -m benchmarks.peers my.toml --only twostep llama.cpp --scenario S1 S2 --rounds 3
  the picture of an earlier document
    python -m benchmarks.peers peers.json --plot peers.png

What follows -- goes to the load test (python -m loadtest --help); so do scenarios and definitions of the metrics.
exit codes: 0 all measured, 1 something was not, 2 a file or command line that makes no sense, 130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    given, load = _split(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    try:
        if options.plot is not None:
            check_plot(options.plot)
            _check_writable("--plot", options.plot)
        if options.file.suffix == ".json":
            return _redraw(options, load)
        plan_options = PlanOptions(
            options.only, options.scenario, options.subject, options.rounds, options.limit, options.seed, load
        )
        plan = read_plan(options.file, plan_options, random.SystemRandom().randrange(2**31))
        if options.json is not None:
            _check_writable("--json", options.json)
        if options.logs is not None and not options.dry_run:
            _make_directory(options.logs)
    except LoadTestError as error:
        return _fail(str(error))
    _print_plan(plan)
    if options.dry_run:
        return 0
    if all(server.skipped for server in plan.servers):
        return _fail("no server can be started: all are left out")
    with tempfile.TemporaryDirectory(prefix="peers-") as directory:
        return _run(plan, options, options.logs or Path(directory))


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits the arguments at the first --."""
    words = list(arguments)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _redraw(options: argparse.Namespace, load: Sequence[str]) -> int:
    """Draws an earlier document. Raises UsageError for any other option: it would have no effect."""
    default = _parser().get_default
    asked = [name for name, value in vars(options).items() if name not in ("file", "plot") and value != default(name)]
    if asked or load:
        words = ", ".join((*(f"--{name.replace('_', '-')}" for name in asked), *load[:1]))
        raise UsageError(f"{options.file}: a document is drawn as it is, so this has no effect: {words}")
    if options.plot is None:
        return _fail("a document can only be drawn: --plot FILE says where to")
    try:
        draw(json.loads(options.file.read_text(encoding="utf-8")), options.plot)
    except OSError as error:
        return _fail(str(error))
    except (ValueError, LookupError, TypeError) as error:
        return _fail(f"{options.file}: not a document of a comparison: {error!r}")
    return 0


def _print_plan(plan: Plan) -> None:
    startable = [server for server in plan.servers if not server.skipped]
    for server in plan.servers:
        status = f"left out: {server.skipped}" if server.skipped else " ".join(server.command.split())
        _print_line(f"{server.name:20} {status}")
    _print_line(f"{plan.rounds} rounds of {len(startable)} servers, {', '.join(plan.scenarios)}, seed {plan.seed}")


def _run(plan: Plan, options: argparse.Namespace, logs: Path) -> int:
    def progress() -> contextlib.AbstractContextManager[Progress]:
        return ProgressBar(Console(stderr=True)) if sys.stderr.isatty() else contextlib.nullcontext(NoProgress())

    def save(is_complete: bool = False) -> None:
        if options.json is not None:
            _write(options.json, json.dumps(document(comparison, is_complete), allow_nan=False))

    comparison = Comparison(plan, logs, _print_line, progress, save)
    allow_many_connections()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        is_complete = runner.run(_until_signalled(comparison))
    save(is_complete)
    print_report(Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL), comparison)
    if options.plot is not None:
        draw(json.loads(json.dumps(document(comparison, is_complete))), options.plot)
    if not is_complete:
        return _INTERRUPTED
    return 1 if any(run.problem for result in comparison.results for run in result.runs) else 0


async def _until_signalled(comparison: Comparison) -> bool:
    """Runs the comparison; returns whether it was completed.

    A first signal ends the running server by SIGTERM, a second one kills it.
    """
    loop, running = asyncio.get_running_loop(), asyncio.create_task(comparison.run())
    for number in _SIGNALS:
        loop.add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        return False
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
    return True


def _check_writable(flag: str, path: Path) -> None:
    """Raises UsageError, before hours are spent, if the file cannot be written. An earlier file stays as it is."""
    if path.is_dir():
        raise UsageError(f"{flag}: {path} is a directory")
    beside = _beside(path)
    try:
        beside.touch()
        beside.unlink()
    except OSError as error:
        raise UsageError(f"{flag}: cannot write {path}: {error.strerror}") from None


def _make_directory(path: Path) -> None:
    """Makes a directory with its parents; raises UsageError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--logs: cannot make {path}: {error.strerror}") from None


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _write(path: Path, text: str) -> None:
    """Writes the file atomically: a comparison takes hours, and may be killed in any minute of them."""
    beside = _beside(path)
    beside.write_text(f"{text}\n", encoding="utf-8")
    os.replace(beside, path)


def _print_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _fail(sentence: str) -> int:
    _print_line(f"peers: {sentence}")
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        usage="python -m benchmarks.peers FILE [options] [-- LOADTEST OPTIONS]",
        description="Starts servers one after the other, puts the load test's scenarios on each, and compares them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="servers (.toml), or an earlier document (.json) to draw")
    add("--only", nargs="+", default=(), metavar="NAME", help="these servers (default: all of the file)")
    add("--scenario", nargs="+", default=(), choices=tuple(SCENARIOS), help="these scenarios (default: the file's)")
    add("--subject", metavar="NAME", help="ratios are to this server (default: the file's, or its first)")
    add("--rounds", type=positive, metavar="N", help="default: the file's, or 2")
    add("--limit", type=positive, metavar="S", help="give up a scenario after S seconds (default: the file's, or 600)")
    add("--seed", type=int, help="of prompts (default: a new one, which is printed)")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured there, after each server's turn")
    add("--plot", type=Path, metavar="FILE", help="draw the comparison: .svg, .png or .pdf; needs matplotlib")
    add("--logs", type=Path, metavar="DIR", help="keep what the servers print there")
    add("--dry-run", action="store_true", help="check the file, print the plan, start nothing")
    return parser
