"""Flags of `twostep serve` that a command takes, too, and hands on to the server that it starts."""

import argparse
from collections.abc import Sequence
from typing import Any

from server.settings.reading import flag_of
from server.settings.settings import Settings
from twostep.commands.arguments import CommandParser

__all__ = ["add_serve_flags"]


class _HandOn(argparse.Action):
    """Adds a flag, with its value as it was written, to the list `serve_flags`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        written = option_string if self.nargs == 0 else f"{option_string}={values}"
        namespace.serve_flags = [*namespace.serve_flags, written]


def add_serve_flags(parser: CommandParser) -> None:
    """Adds the flags of `twostep serve` that the parser does not have itself; its help leaves them out. Those that are
    given are in `serve_flags`, in their order."""
    parser.set_defaults(serve_flags=[])
    own = parser.flags()
    for name, field in Settings.model_fields.items():
        flag = flag_of(name)
        if name == "model" or flag in own:
            continue
        is_switch = field.annotation is bool
        names = [flag, flag.replace("--", "--no-", 1)] if is_switch else [flag]
        parser.add_argument(*names, action=_HandOn, nargs=0 if is_switch else None, help=argparse.SUPPRESS)
