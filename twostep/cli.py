"""The command `twostep`: finds the command that is asked for, and imports no other one. Errors are one sentence on
stderr and exit code 2."""

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from engine.core.errors import TwostepError
from twostep.commands.listing import COMMANDS

__all__ = ["main"]

EXIT_ERROR, EXIT_INTERRUPTED = 2, 130

_HELP = """\
usage: twostep COMMAND ...

Language models on your own machine: serve them, talk with them, measure them.

commands:
{commands}

twostep COMMAND --help tells more, with examples; twostep --version the version.

examples:
  twostep chat                                         try it with the embedded toy model
  twostep chat Qwen/Qwen2.5-0.5B-Instruct              from the hub
  twostep chat http://127.0.0.1:8000                   with a server's model
  twostep run ./model.gguf "Name three birds."         one answer, from a GGUF file
  twostep serve Qwen/Qwen2.5-0.5B-Instruct             an OpenAI-compatible server on port 8000"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    try:
        return _run(command, rest)
    except TwostepError as error:
        print(f"twostep: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of stdout closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(command: str, rest: list[str]) -> int:
    if command in ("-h", "--help", "help"):
        print(_help())
        return 0
    if command == "":
        print(_help(), file=sys.stderr)
        return EXIT_ERROR
    if command == "--version":
        from server.core.version import VERSION

        print(f"twostep {VERSION}")
        return 0
    if command in ("serve", "key"):
        from server.cli import main as run_server

        return run_server([command, *rest])
    if command not in COMMANDS:
        return _unknown(command)
    return int(import_module(f"twostep.commands.{command}").main(rest))


def _unknown(command: str) -> int:
    close = get_close_matches(command, COMMANDS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}."
    print(f"twostep: {command} is no command; {hint}", file=sys.stderr)
    return EXIT_ERROR


def _help() -> str:
    return _HELP.format(commands="\n".join(f"  {name:12}{text}" for name, text in COMMANDS.items()))
