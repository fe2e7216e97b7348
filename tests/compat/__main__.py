"""Other people's clients, unchanged, against a running server: `python -m tests.compat [CLIENT ...]`.

Each client is installed from its registry into an environment of its own and runs one script of `clients/`. That takes
minutes and gigabytes the first time, so it is not part of the default tests.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.compat.environments import CLIENTS, Client, install

ROOT = Path(__file__).resolve().parent.parent.parent
EMBEDDED_MODEL = ROOT / "engine" / "embedded_model"
TIMEOUT_S = 900
TAIL_LINES = 25


def main() -> int:
    options = _parser().parse_args()
    names = options.clients or list(CLIENTS)
    console = Console()
    agents = [CLIENTS[name] for name in names if CLIENTS[name].replies]
    others = [CLIENTS[name] for name in names if not CLIENTS[name].replies]
    results = []
    if others:
        with _server(options.url) as url:
            results += [(client, *_try_client(client, url, options, console)) for client in others]
    for client in agents:
        with _started("-m", "tests.compat.scripted_model", client.name) as url:
            results.append((client, *_try_client(client, url, options, console)))
    table = Table("client", "version", "result", "seconds")
    for client, version, is_ok, seconds in results:
        table.add_row(client.name, version, "[green]works" if is_ok else "[red]fails", f"{seconds:.0f}")
    console.print(table)
    return 0 if all(is_ok for _, _, is_ok, _ in results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("clients", nargs="*", choices=[*CLIENTS, []], metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--url", help="a running server; by default one is started with the embedded model")
    parser.add_argument("--model", default="embedded", help="the model's name on that server")
    parser.add_argument("--tokenizer", default=str(EMBEDDED_MODEL), help="its tokenizer's directory or hub id")
    parser.add_argument(
        "--environments",
        type=Path,
        default=Path.home() / ".cache" / "twostep" / "compat",
        help="where clients are installed (default: %(default)s)",
    )
    return parser


def _try_client(client: Client, url: str, options: argparse.Namespace, console: Console) -> tuple[str, bool, float]:
    """Returns the client's version, whether its script passed, and how long that took. Prints a failed script's
    output."""
    with console.status(f"{client.name}: installing"):
        installed = install(client, options.environments)
    environment = os.environ | {
        "TWOSTEP_URL": url,
        "TWOSTEP_MODEL": "scripted" if client.replies else options.model,
        "TWOSTEP_TOKENIZER": options.tokenizer,
        "PATH": f"{installed.programs}:{os.environ['PATH']}",
    }
    environment.pop("PYTHONPATH", None)
    started_s = time.monotonic()
    with console.status(f"{client.name} {installed.version}: running"), tempfile.TemporaryDirectory() as directory:
        script = str(Path(__file__).parent / "clients" / client.script)
        try:
            done = subprocess.run(
                [*installed.interpreter, script],
                cwd=directory,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            is_ok, output = done.returncode == 0, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            is_ok, output = False, f"not done after {TIMEOUT_S} s"
    console.print(f"{client.name} {installed.version}: {'works' if is_ok else 'fails'}")
    if not is_ok:
        console.print("\n".join(output.splitlines()[-TAIL_LINES:]), markup=False, highlight=False)
    return installed.version, is_ok, time.monotonic() - started_s


@contextmanager
def _server(url: str | None) -> Iterator[str]:
    """Yields the address of a server with a model: the given one, or one with the embedded model."""
    if url is not None:
        yield url.rstrip("/")
        return
    with _started("-m", "server", "serve", "--port", "0", "--log-level", "warning") as started:
        yield started


@contextmanager
def _started(*arguments: str) -> Iterator[str]:
    """Yields the address of a server that runs as a program of its own."""
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield next(line.split()[1] for line in process.stdout if line.startswith("  listens "))
    finally:
        process.terminate()
        process.communicate()


if __name__ == "__main__":
    sys.exit(main())
