"""The plan of a comparison: a TOML file of servers, read and checked once, with the command line's options."""

import os
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from loadtest.arguments import given, parse_config
from loadtest.config import SCENARIOS, Config
from loadtest.errors import UsageError

_NO_URL = "http://127.0.0.1:1"  # for a config that is only checked
# Flags that a load cannot have: the plan decides the first ones, the others would have no effect.
_OWN = ("scenario", "seed", "rounds", "wait", "json", "quiet", "strict", "sweep", "plot")


@dataclass(frozen=True)
class ServerPlan:
    """A server's entry in the file. `skipped` says why it cannot be started, and is empty when it can."""

    name: str
    command: str
    version: str = ""  # a command that prints it
    environment: Mapping[str, str] = field(default_factory=dict)
    load: tuple[str, ...] = ()  # flags of the load test that this server needs
    scenarios: tuple[str, ...] = ()
    start_timeout_s: float = 300.0
    skipped: str = ""

    def arguments(self, port: int) -> list[str]:
        return _words(self.command, port)

    def version_arguments(self) -> list[str]:
        return _words(self.version, 0)

    def variables(self, port: int) -> dict[str, str]:
        """Returns the environment variables of the server process."""
        return {**os.environ, **{name: _filled(value, port) for name, value in self.environment.items()}}


@dataclass(frozen=True)
class Plan:
    """A comparison to be run: servers, scenarios and their load."""

    servers: tuple[ServerPlan, ...]
    scenarios: tuple[str, ...]
    subject: str  # the server that all others are compared with
    rounds: int
    limit_s: float  # of one scenario on one server
    seed: int
    load: tuple[str, ...]

    def config(self, server: ServerPlan, scenario: str, round_number: int, url: str = _NO_URL) -> Config:
        """Returns the load test's config of one run. The prompts of a round are the same for all servers.

        Raises UsageError for a load that this program would have to ignore, or that names another server.
        """
        seed = f"{self.seed}{round_number:03}{list(SCENARIOS).index(scenario)}"
        load = [*self.load, *(_filled(flag, 0) for flag in server.load)]
        if taken := given([url, *load], _OWN):
            raise UsageError(f"--{taken[0]} does not belong to the load: it is decided here (--help), or not used")
        own = [url, "--scenario", scenario, "--seed", seed, "--rounds", "1", "--wait", "0"]
        config = parse_config([*load, *own])
        if config.urls != (url,):
            raise UsageError(f"the load cannot name a server: {', '.join(config.urls)}")
        return config

    def turns(self) -> list[list[ServerPlan]]:
        """Returns the order of servers in each round.

        Every second round runs backwards, so that a machine that slowly changes favours no server.
        """
        startable = [server for server in self.servers if not server.skipped]
        return [startable[:: -1 if round_number % 2 else 1] for round_number in range(self.rounds)]


@dataclass(frozen=True)
class PlanOptions:
    """Options of the command line, which override the file; None or empty leaves the choice to the file."""

    only: Sequence[str] = ()
    scenarios: Sequence[str] = ()
    subject: str | None = None
    rounds: int | None = None
    limit_s: float | None = None
    seed: int | None = None
    load: Sequence[str] = ()


def read_plan(path: Path, options: PlanOptions, new_seed: int) -> Plan:
    """Reads and checks a plan; starts nothing. Raises UsageError, with the place, if file or options make no sense."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None
    _known(table, {"server", "scenarios", "subject", "rounds", "limit_s", "load"}, str(path))
    asked = tuple(options.scenarios) or _strings(table, "scenarios", str(path)) or tuple(SCENARIOS)
    scenarios = tuple(dict.fromkeys(asked))  # named twice, a prefix cache would know its prompts the second time
    entries = table.get("server", [])
    if not (isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)):
        raise UsageError(f"{path}: servers are written as [[server]]")
    servers = tuple(_server(entry, scenarios, f"{path}: server {number}") for number, entry in enumerate(entries, 1))
    names = [server.name for server in servers]
    _check_names(names, options, table.get("subject"), str(path))
    servers = tuple(server for server in servers if server.name in (options.only or names))
    if not servers:
        raise UsageError(f"{path}: there is no [[server]]")
    subject = options.subject or table.get("subject") or servers[0].name
    plan = Plan(
        servers=servers,
        scenarios=scenarios,
        subject=subject if any(server.name == subject for server in servers) else servers[0].name,
        rounds=options.rounds or _whole_number(table, "rounds", 2, str(path)),
        limit_s=options.limit_s or _number(table, "limit_s", 600, str(path)),
        seed=new_seed if options.seed is None else options.seed,
        load=(*_strings(table, "load", str(path)), *options.load),
    )
    for server in plan.servers:
        for scenario in server.scenarios:
            plan.config(server, scenario, 0)
    return plan


def _check_names(names: Sequence[str], options: PlanOptions, subject: str | None, where: str) -> None:
    for name in (*options.only, *filter(None, (options.subject, subject))):
        if name not in names:
            raise UsageError(f"{where}: no server is called {name}; there are: {', '.join(names) or 'none'}")
    if len(set(names)) < len(names):
        raise UsageError(f"{where}: two servers have the same name")
    if options.only and options.subject is not None and options.subject not in options.only:
        raise UsageError(f"--subject {options.subject} is not among the servers of --only")


def _server(entry: Mapping[str, Any], scenarios: Sequence[str], where: str) -> ServerPlan:
    _known(entry, {"name", "command", "version", "environment", "load", "scenarios", "start_timeout_s"}, where)
    for key in ("name", "command"):
        if not isinstance(entry.get(key), str) or not entry[key].strip():
            raise UsageError(f"{where}: {key} is missing or not a string")
    if not isinstance(entry.get("version", ""), str):
        raise UsageError(f"{where}: version is a string")
    environment = entry.get("environment", {})
    if not (isinstance(environment, dict) and all(isinstance(value, str) for value in environment.values())):
        raise UsageError(f"{where}: environment is a table of strings")
    chosen = _strings(entry, "scenarios", where)
    server = ServerPlan(
        name=entry["name"],
        command=entry["command"],
        version=entry.get("version", ""),
        environment=environment,
        load=_strings(entry, "load", where),
        scenarios=tuple(name for name in scenarios if not chosen or name in chosen),
        start_timeout_s=_number(entry, "start_timeout_s", 300, where),
    )
    return _skipped_if_unset(server, where)


def _skipped_if_unset(server: ServerPlan, where: str) -> ServerPlan:
    """Returns the server, skipped if one of its variables is not set: then it is not installed here, which is no error.

    Raises UsageError for words or variables that cannot be parsed.
    """
    try:
        _words(server.version, 0)
        if not _words(server.command, 0):
            raise UsageError(f"{where}: command is missing: all of it is a comment")
        for text in (*server.environment.values(), *server.load):
            _filled(text, 0)
    except KeyError as missing:
        return ServerPlan(
            server.name, server.command, scenarios=server.scenarios, skipped=f"{missing.args[0]} is not set"
        )
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    return server


def _words(command: str, port: int) -> list[str]:
    """Splits a command into words. Variables are filled in afterwards, so a value with spaces stays one word."""
    return [_filled(word, port) for word in shlex.split(command, comments=True)]


def _filled(text: str, port: int) -> str:
    return Template(text).substitute(os.environ, PORT=str(port), PYTHON=sys.executable)


def _known(table: Mapping[str, Any], keys: set[str], where: str) -> None:
    if unknown := sorted(table.keys() - keys):
        raise UsageError(f"{where}: nothing is called {unknown[0]} here; there are: {', '.join(sorted(keys))}")


def _strings(table: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = table.get(key, [])
    if not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise UsageError(f"{where}: {key} is a list of strings")
    if key == "scenarios" and (unknown := [name for name in value if name not in SCENARIOS]):
        raise UsageError(f"{where}: no scenario is called {unknown[0]}; there are: {', '.join(SCENARIOS)}")
    return tuple(value)


def _number(table: Mapping[str, Any], key: str, default: float, where: str) -> float:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 1e6:
        raise UsageError(f"{where}: {key} is a number from 1 up")
    return value


def _whole_number(table: Mapping[str, Any], key: str, default: int, where: str) -> int:
    value = _number(table, key, default, where)
    if not isinstance(value, int):
        raise UsageError(f"{where}: {key} is a whole number")
    return value
