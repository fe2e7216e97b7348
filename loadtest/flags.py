"""The command line's flags: their names, help and value checks."""

import argparse
import json
import re
from difflib import get_close_matches
from typing import Any, NoReturn

from loadtest.config import API_KEY_VARIABLES, DECODER_DEFAULTS, DEFAULT_NUM_REQUESTS, SCENARIOS
from loadtest.datasets.flags import add_dataset_flags
from loadtest.endpoints import Endpoint
from loadtest.help_text import EPILOG, PROGRAM
from loadtest.numbers import count, number, positive, positive_number
from loadtest.sessions.flags import add_session_flags
from loadtest.sweep.flags import add_sweep_flags
from loadtest.workload import WorkloadKind

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a token of RFC 9110
_DEFAULT_URL = "http://127.0.0.1:8000"
_URL = "http://HOST:PORT without a flag"
_OUR_NAMES = {
    "--base-url": _URL,
    "--url": _URL,
    "--host": _URL,
    "--port": _URL,
    "--num-prompts": "--requests",
    "--num-requests": "--requests",
    "--request-rate": "--rate",
    "--random-input-len": "--prompt-len",
    "--random-output-len": "--output-len",
}  # by the flags of other load tests, such as vLLM's


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, with the flag that was probably meant."""

    def error(self, message: str) -> NoReturn:
        hint = self._hint(message.partition("unrecognized arguments: ")[2].partition(" ")[0].partition("=")[0])
        self.exit(2, f"{self.prog}: {message}{hint}; {self.prog} --help lists all flags\n")

    def _hint(self, unknown: str) -> str:
        if unknown in _OUR_NAMES:
            return f" (did you mean {_OUR_NAMES[unknown]}?)"
        close = get_close_matches(unknown, self._option_string_actions, n=1)
        return f" (did you mean {close[0]}?)" if close else ""


def flag_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Returns the parser, which ends the program with one line for an unknown flag or an invalid value. Help and errors
    call it `program`."""
    parser = _Parser(
        prog=program,
        usage=f"{program} [URL ...] [options]",
        description="Measures OpenAI-compatible servers with streaming requests.",
        epilog=EPILOG.replace(PROGRAM, program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "urls",
        nargs="*",
        default=[_DEFAULT_URL],
        metavar="URL",
        help=f"http(s)://host:port of a server; several are compared (default: {_DEFAULT_URL})",
    )
    _add_rounds(parser)
    _add_load(parser.add_argument_group("load"))
    add_sweep_flags(parser.add_argument_group("several loads"))
    _add_shape(parser.add_argument_group("what is sent"))
    add_dataset_flags(parser.add_argument_group("requests of a file"))
    add_session_flags(parser.add_argument_group("agent sessions"))
    _add_wire(parser.add_argument_group("requests"))
    _add_output(parser.add_argument_group("results"))
    return parser


def _add_rounds(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--compare",
        action="append",
        default=[],
        metavar="URL",
        help="another server, B: rounds alternate A B A B, and ratios have 95 %% confidence intervals; may be repeated",
    )
    add(
        "--rounds",
        type=positive,
        help="runs per URL, alternating A B A B (default: 1; several URLs: 2; with --compare: 5)",
    )
    add(
        "--wait",
        type=number,
        default=0.0,
        metavar="S",
        help="wait up to S seconds until the server is ready (default: do not wait)",
    )
    add(
        "--seed",
        type=int,
        help="of prompts and arrivals (default: a new one each time, so that no "
        "prefix cache knows the prompts of an earlier run; it is printed)",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--scenario", choices=tuple(SCENARIOS), help="a named load, see below")
    add(
        "--concurrency",
        type=positive,
        metavar="N",
        help=f"closed loop: N streams (default 1; of decoders: {DECODER_DEFAULTS['concurrency']}); "
        "with --rate: at most N requests under way",
    )
    add("--rate", type=positive_number, metavar="R", help="open loop: R requests per second, Poisson arrivals")
    add(
        "--requests",
        type=positive,
        metavar="N",
        help=f"end after N requests (default {DEFAULT_NUM_REQUESTS}; of decoders: one per stream; "
        "with --duration: no limit)",
    )
    add("--duration", type=positive_number, metavar="S", help="begin no request after S seconds")
    add(
        "--warmup",
        type=count,
        default=2,
        metavar="N",
        help="requests sent before the measurement, left out of all results (default 2)",
    )


def _add_shape(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--workload", choices=tuple(kind.value for kind in WorkloadKind), help="default: random")
    add(
        "--prompt-len",
        type=positive,
        metavar="N",
        help="tokens of a prompt, of an agent's turn (default 128; of decoders: 32)",
    )
    add(
        "--max-tokens",
        "--output-len",
        dest="output_len",
        type=positive,
        metavar="N",
        help="tokens of an answer (default 128; of decoders: 256; of a file: as it says, else 128)",
    )
    add(
        "--prefix-len",
        type=positive,
        metavar="N",
        help="shared-prefix: the part of --prompt-len that is shared",
    )
    add("--long-prompt-len", type=positive, metavar="N", help="long-among-decoders: default 2048")
    add("--long-output-len", type=positive, metavar="N", help="long-among-decoders: default 16")
    add("--long-every", type=positive_number, metavar="S", help="long-among-decoders: default 2")
    add(
        "--vocab-size",
        type=positive,
        metavar="N",
        help="prompts are drawn from token ids below N (default 1000: few models know fewer)",
    )
    add(
        "--text",
        action="store_true",
        help="prompts are English words, about one token each, instead of token ids; chats and responses always are",
    )


def _add_wire(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--endpoint",
        choices=tuple(kind.value for kind in Endpoint),
        help="/v1/completions (the default), /v1/chat/completions (that of agent-sessions) or /v1/responses",
    )
    add("--model", help="default: the first of GET /v1/models")
    add("--api-key", metavar="KEY", help=f"default: {' or '.join(API_KEY_VARIABLES)} of the environment")
    add(
        "--header",
        type=_header,
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="of every request; may be repeated",
    )
    add("--temperature", type=number, default=0.0, metavar="T", help="default 0")
    add("--extra-body", type=_json_object, default={}, metavar="JSON", help="more fields, e.g. '{\"top_k\": 5}'")
    add(
        "--timeout",
        type=positive_number,
        default=600.0,
        metavar="S",
        help="seconds that one request may take, retries included (default 600)",
    )
    add("--retry-429", action="store_true", help="after a 429 wait as Retry-After says, then send it again")
    _add_answers(group)


def _add_answers(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="send ignore_eos: true, so that answers have --max-tokens tokens",
    )
    add(
        "--include-usage",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for usage; token counts are unknown without it",
    )
    add(
        "--done",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a stream must end with [DONE]; --no-done for a server that ends without",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--goodput",
        type=_target,
        nargs="+",
        action="extend",
        metavar="NAME:MS",
        help="count the requests within these limits, e.g. ttft:500 itl:50; names: ttft, itl (the 99th percentile of a "
        "request's gaps), tpot, e2e",
    )
    add("--json", metavar="FILE", help="write the JSON document to FILE; -: to stdout, as its last line")
    add("--quiet", action="store_true", help="no progress bar")
    add("--strict", action="store_true", help="exit with 1 where there was any warning")


def _target(text: str) -> tuple[str, float]:
    name, colon, limit = text.partition(":")
    name = {"e2el": "e2e"}.get(name, name)  # as vLLM calls it
    if name not in ("ttft", "itl", "tpot", "e2e") or not colon:
        raise argparse.ArgumentTypeError(f"{text!r} does not look like ttft:500, itl:50, tpot:50 or e2e:5000")
    return name, positive_number(limit)


def _header(text: str) -> tuple[str, str]:
    name, colon, value = (part.strip() for part in text.partition(":"))
    if not (colon and _HEADER_NAME.fullmatch(name) and text.isascii() and text.isprintable()):
        raise argparse.ArgumentTypeError(f"{text!r} does not look like 'Name: value'")
    if name.lower() in ("content-length", "transfer-encoding"):
        raise argparse.ArgumentTypeError(f"{name} follows from the request")
    return name.lower(), value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # Python reads NaN, Infinity and 1e999; no server does
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value
