"""The command line: `twostep serve [MODEL]` and `twostep key NAME`. Errors are one sentence on stderr and exit code
2."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import ByteSize, PositiveInt
from pydantic.fields import FieldInfo

from engine.core.errors import TwostepError
from server.auth.api_keys import new_key
from server.core.logs import configure_logging
from server.core.version import VERSION
from server.settings.other_servers import OUR_NAMES
from server.settings.reading import flag_of, read_settings
from server.settings.settings import Names, Settings

EXIT_ERROR = 2

_DESCRIPTION = "An OpenAI-compatible inference server that schedules, measures and explains prefill and decode apart."
_SERVE_DESCRIPTION = """\
Serve a model over HTTP. MODEL is a checkpoint directory, a GGUF file or a Hugging Face hub id; without it a small
embedded toy model is served, which needs no download.

Every flag can also be set in the environment (--max-num-seqs is TWOSTEP_MAX_NUM_SEQS) and in a YAML file given with
--config (max-num-seqs: 32). A flag wins over the environment, the environment over the file."""
_KEY_DESCRIPTION = "Make a random API key: its entry for --api-keys-file on stdout, the key itself on stderr."
_KEY_EXAMPLES = """\
examples:
  twostep key alice >> keys.yaml                       adds her entry, and shows the key
  twostep serve --api-keys-file keys.yaml              for whoever has a key of the file"""
_EXAMPLES = """\
examples:
  twostep serve                                        try it with the embedded toy model
  twostep serve Qwen/Qwen2.5-0.5B-Instruct             from the hub
  twostep serve ./my-model-Q4_K_M.gguf                 from a GGUF file
  twostep serve org/my-model-GGUF:Q4_K_M               from a GGUF file on the hub
  twostep serve ./my-model --served-model-name mine    from a directory, under a name of your choice
  twostep serve ./my-model --lora sql=./my-adapter     with an adapter, which clients name as a model
  TWOSTEP_API_KEY=secret twostep serve ./my-model      only for clients that send the key
  TWOSTEP_API_KEY=secret twostep serve ./my-model --host 0.0.0.0    for other machines, too
  twostep serve --config server.yaml                   settings from a file

then:
  curl -N http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"prompt": "A list is", "max_tokens": 32, "stream": true}'"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_ERROR, f"{self.prog}: {message}; {self.prog} --help lists what there is.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the server runs, SIGTERM ends it as Ctrl-C does
    try:
        command, flags = parse_command(arguments)
        if command == "key":
            return print_key(flags["name"])
        settings = read_settings(flags)
        configure_logging(settings.log_level, settings.log_format)
        if settings.api_keys_file is not None:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the file is about to be read: see DrainingServer
        return _serve(settings)
    except TwostepError as error:
        print(f"twostep: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return 0


def _serve(settings: Settings) -> int:
    """Serves, and returns the exit code. Raises TwostepError."""
    # Imported here, the web framework last, so that --help and wrong settings do not wait for it, nor the engine.
    from server.runtime.backend import backend_opener

    open_backend = backend_opener(settings)
    import uvloop

    from engine.client.async_engine import ENGINE_COMMAND
    from engine.process.first_process import first_process

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, first_process(runner, ENGINE_COMMAND) as first:
        from server.serve import serve

        return serve(settings, partial(open_backend, first=first), runner)


def parse_command(arguments: Sequence[str] | None = None) -> tuple[str, dict[str, Any]]:
    """Returns the command and its flags, unvalidated. Ends the process on --help, --version and unknown flags."""
    parser = _parser()
    parsed, unknown = parser.parse_known_args(arguments)
    flags = vars(parsed)
    command = flags.pop("command")
    if command is None:
        parser.print_help(sys.stderr)
        parser.exit(EXIT_ERROR)
    if unknown:
        parser.prog += f" {command}"
        close = _meant(unknown[0].partition("=")[0])
        parser.error(f"unrecognized argument {unknown[0]}" + (f" (did you mean {close}?)" if close else ""))
    return command, flags


def _meant(given: str) -> str | None:
    """Returns what was probably meant. Dashes at the beginning, which all have, make none similar."""
    if not given.startswith("-"):
        return None
    if given in OUR_NAMES:
        return OUR_NAMES[given]
    flags = [flag_of(name) for name in Settings.model_fields if name != "model"]
    close = get_close_matches(given.strip("-"), [flag.strip("-") for flag in flags], n=1)
    return f"--{close[0]}" if close else None


def print_key(name: str) -> int:
    """Prints a new key's entry on stdout and its secret on stderr, so that `twostep key NAME >> FILE` adds the entry
    and shows the secret. Raises ConfigError."""
    secret, entry = new_key(name)
    print(entry, end="")
    print(f"The key of {name}, shown this once: {secret}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="twostep", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=_Formatter)
    parser.add_argument("--version", action="version", version=f"twostep {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP; twostep serve --help lists the settings",
        description=_SERVE_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=_Formatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    key = commands.add_parser(
        "key",
        help="make an API key for --api-keys-file",
        description=_KEY_DESCRIPTION,
        epilog=_KEY_EXAMPLES,
        formatter_class=_Formatter,
    )
    key.add_argument("name", metavar="NAME", help="whose key it is: in the log, the metrics and the file")
    groups: dict[str, Any] = {}
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        title = str(extra["group"])
        if title not in groups:
            groups[title] = serve.add_argument_group(title)
        _add_argument(groups[title], name, field, extra["metavar"])
    return parser


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=38, width=120)


def _add_argument(group: Any, name: str, field: FieldInfo, metavar: object) -> None:
    """Adds the flag of one setting. Its value stays text here: `Settings` validates flags, environment and file
    alike."""
    text = _help(field)
    choices = [choice for part in (field.annotation, *get_args(field.annotation)) for choice in _literals(part)]
    if name == "model":
        group.add_argument(name, nargs="?", metavar="MODEL", help=text)
    elif field.annotation is bool:
        group.add_argument(flag_of(name), action=argparse.BooleanOptionalAction, help=text)
    elif field.annotation == get_args(Names)[0]:
        group.add_argument(flag_of(name), action="append", metavar=metavar, help=text)
    else:
        is_number = not {int, PositiveInt}.isdisjoint((field.annotation, *get_args(field.annotation)))
        shown = metavar or ("{" + ",".join(choices) + "}" if choices else "N" if is_number else name.upper())
        group.add_argument(flag_of(name), metavar=shown, help=text)


def _literals(annotation: Any) -> tuple[str, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _help(field: FieldInfo) -> str:
    default = field.default.human_readable() if isinstance(field.default, ByteSize) else field.default
    text = (field.description or "").replace("%", "%%")
    return text if default in (None, (), False) else f"{text} Default: {'on' if default is True else default}."
