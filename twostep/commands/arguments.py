"""The argument parser of the commands, whose errors are one sentence that names the nearest flag."""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

__all__ = ["CommandParser"]


class CommandParser(argparse.ArgumentParser):
    """A parser of one command."""

    def __init__(self, command: str, description: str, examples: str) -> None:
        super().__init__(
            prog=f"twostep {command}",
            description=description,
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Returns the values of the flags, which may stand before, between and behind other arguments. Ends the process
        on --help and on flags that there are not."""
        parsed, unknown = self.parse_known_intermixed_args(arguments)
        if unknown:
            self.error(f"unrecognized argument {unknown[0]}{self._hint(unknown[0])}")
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists what there is.\n")

    def flags(self) -> list[str]:
        """Returns the long flags, as completion offers them."""
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]

    def _hint(self, given: str) -> str:
        if not given.startswith("-"):
            return " (what has spaces is to be quoted)"
        names = [flag.strip("-") for flag in self.flags()]
        close = get_close_matches(given.partition("=")[0].strip("-"), names, n=1)
        return f" (did you mean --{close[0]}?)" if close else ""
