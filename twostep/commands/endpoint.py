"""Where a command finds its model: on a server with a URL, or on one that it starts for itself."""

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from engine.core.errors import TwostepError
from engine.host.parent_death import signal_when_parent_dies
from engine.host.python_module import module_command

__all__ = ["Endpoint", "EndpointError", "open_endpoint"]

_END_S = 20
_ADDRESS = re.compile(r"[\w-]+(\.[\w-]+)*:[0-9]{1,5}(/.*)?")
"""A server's address without its scheme, such as localhost:8000."""


class EndpointError(TwostepError):
    """A server cannot be reached, or refuses what it is asked."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server."""

    url: str
    """Without /v1."""
    api_key: str | None
    is_local: bool
    """Whether this process started it, for itself."""


@contextmanager
def open_endpoint(model: str | None, flags: Sequence[str]) -> Generator[Endpoint, None, None]:
    """Returns the server of a URL, which gets the key in TWOSTEP_API_KEY, or starts one for a model with these flags of
    `twostep serve`; that one ends with the context. Raises EndpointError."""
    if model is None or not re.match(r"https?://", model, re.IGNORECASE):
        if model and _ADDRESS.fullmatch(model) and not os.path.exists(model):
            raise EndpointError(f"{model} looks like a server's address: write http://{model}.")
        with _started(model, flags) as endpoint:
            yield endpoint
        return
    if flags:
        raise EndpointError(
            f"{flags[0].partition('=')[0]} is a flag of twostep serve, and {model} serves already: leave it out."
        )
    key = os.environ.get("TWOSTEP_API_KEY")
    if key and not (key.isascii() and key.isprintable()):
        raise EndpointError("TWOSTEP_API_KEY is no key: it has characters other than those of ASCII.")
    yield Endpoint(model.rstrip("/").removesuffix("/v1"), key, is_local=False)


@contextmanager
def _started(model: str | None, flags: Sequence[str]) -> Generator[Endpoint, None, None]:
    """Runs a server on a free port of this machine, with a key that nobody else knows."""
    key = secrets.token_urlsafe(32)
    named = [] if model is None else [model]
    own = ["--host", "127.0.0.1", "--port", "0"]
    command = [*module_command("server"), "serve", *named, "--log-level", "warning", *flags, *own]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TWOSTEP_API_KEY": key},
        start_new_session=True,  # Ctrl-C ends an answer, not the server
        preexec_fn=partial(signal_when_parent_dies, signal.SIGTERM),  # no thread runs yet
    ) as process:
        try:
            yield Endpoint(_url_of(process, model), key, is_local=True)
        finally:
            process.terminate()  # Python would answer SIGINT with a traceback while it starts
            try:
                process.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _url_of(process: subprocess.Popen[str], model: str | None) -> str:
    """Waits until the model is loaded, and returns the URL. Ends this process, as it ended, where the server does: it
    has said why."""
    assert process.stdout is not None
    name = model or "the embedded model"
    console = Console(stderr=True)
    with console.status(f"loading {name} (a first start of all compiles kernels, for minutes)"):
        for line in process.stdout:
            if found := re.search(r"^  listens (\S+)", line):
                return found[1]
    sys.exit(process.wait() or 1)
