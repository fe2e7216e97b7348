"""Turns the command line into a Config: defaults, scenarios, and flags that depend on each other."""

import argparse
import os
import random
from collections.abc import Iterable, Sequence
from typing import Any

from loadtest.config import (
    API_KEY_VARIABLES,
    DECODER_DEFAULTS,
    DEFAULT_NUM_REQUESTS,
    DEFAULTS,
    SCENARIOS,
    Config,
    Schedule,
    Sweep,
)
from loadtest.datasets.entries import Dataset
from loadtest.datasets.flags import dataset_of, keeps_arrivals
from loadtest.endpoints import Endpoint, WireOptions
from loadtest.errors import UsageError
from loadtest.flags import flag_parser
from loadtest.help_text import PROGRAM
from loadtest.sessions.flags import check_session_flags
from loadtest.stats import Targets
from loadtest.sweep.flags import points_of
from loadtest.workload import Shape, WorkloadKind

_ROUNDS_OF_COMPARISON = 5


def parse_config(arguments: Sequence[str] | None, program: str = PROGRAM) -> Config:
    """Returns the config of the command line (None: sys.argv).

    Raises UsageError for flags that do not go together; argparse ends the program for other errors.
    """
    flags = flag_parser(program).parse_args(arguments)
    check_session_flags(flags)
    endpoint = _endpoint(flags)
    dataset = dataset_of(flags, endpoint)
    sweep = _sweep(flags, dataset)
    schedule = _schedule(flags, dataset) if sweep is None else sweep.schedules[0]
    return Config(
        urls=(*flags.urls, *flags.compare),
        seed=random.SystemRandom().randrange(2**32) if flags.seed is None else flags.seed,
        scenario=flags.scenario,
        rounds=flags.rounds or _rounds(flags),
        shape=_shape(flags, _with_defaults(flags, dataset), is_text=flags.text or endpoint is not Endpoint.COMPLETIONS),
        dataset=dataset,
        is_salted=flags.salt is not False,
        schedule=schedule,
        sweep=sweep,
        wire=_wire(flags, endpoint),
        targets=_targets(flags),
        wait_s=flags.wait,
        is_quiet=flags.quiet,
        is_strict=flags.strict,
        json_file=flags.json,
    )


def given(arguments: Sequence[str], names: Iterable[str]) -> list[str]:
    """Returns the names of the flags that are among the arguments, however they are written and whatever their
    value."""
    unset = dict.fromkeys(names, object())
    flags = vars(flag_parser().parse_args(arguments, argparse.Namespace(**unset)))
    return [name for name in unset if flags[name] is not unset[name]]


def _sweep(flags: argparse.Namespace, dataset: Dataset | None) -> Sweep | None:
    if flags.sweep is None:
        if flags.plot is not None:
            raise UsageError("--plot draws a --sweep")
        return None
    if flags.plot is not None and not flags.plot.endswith(".svg"):
        raise UsageError(f"--plot: the name of an SVG picture ends in .svg, and {flags.plot} does not")
    kind, loads = flags.sweep
    return Sweep(kind, loads, tuple(_schedule(point, dataset) for point in points_of(flags)), flags.plot)


def _schedule(flags: argparse.Namespace, dataset: Dataset | None) -> Schedule:
    chosen = _with_defaults(flags, dataset)
    return Schedule(
        concurrency=chosen.get("concurrency"),
        rate_per_s=flags.rate,
        num_requests=chosen.get("requests"),
        duration_s=flags.duration,
        num_warmup=flags.warmup,
        long_every_s=chosen["long_every"],
        keeps_arrivals=keeps_arrivals(flags, dataset),
        num_sessions=chosen.get("sessions"),
        think_s=chosen["think_time"],
        speedup=flags.speedup or 1.0,
    )


def _with_defaults(flags: argparse.Namespace, dataset: Dataset | None) -> dict[str, Any]:
    """Returns the value of each flag: the given one, else the scenario's, else the workload's default."""
    explicit = {name: value for name, value in vars(flags).items() if value is not None}
    scenario = dict(SCENARIOS.get(flags.scenario, {}))
    if "duration" in explicit:
        scenario.pop("requests", None)
    if "rate" in explicit:
        scenario.pop("concurrency", None)  # its streams are not meant as a bound on an open loop
    is_long = {**scenario, **explicit}.get("workload") == WorkloadKind.LONG_AMONG_DECODERS
    chosen = {**(DECODER_DEFAULTS if is_long else DEFAULTS), **scenario, **explicit}
    if "rate" not in explicit and not keeps_arrivals(flags, dataset):
        chosen.setdefault("concurrency", 1)
    if dataset is not None:
        chosen["requests"] = len(dataset.entries)
    elif flags.workload == WorkloadKind.AGENT_SESSIONS:
        chosen |= _number_of_sessions(chosen)
    elif "duration" not in explicit:
        chosen.setdefault("requests", chosen["concurrency"] if is_long else DEFAULT_NUM_REQUESTS)
    return chosen


def _number_of_sessions(chosen: dict[str, Any]) -> dict[str, int]:
    """Returns how many sessions there are, and how many requests they have at most; neither with a duration alone."""
    if "duration" in chosen and "sessions" not in chosen:
        return {}
    num = chosen.get("sessions", chosen["concurrency"])
    return {"sessions": num, "requests": num * chosen["turns"]}


def _rounds(flags: argparse.Namespace) -> int:
    """Returns how many rounds there are by default; with --compare as many as a confidence interval needs."""
    if flags.compare:
        return _ROUNDS_OF_COMPARISON
    return 1 if len(flags.urls) == 1 else 2


def _targets(flags: argparse.Namespace) -> Targets:
    named = flags.goodput or []
    if len(dict(named)) < len(named):
        raise UsageError("--goodput has two limits of one latency")
    return Targets(**{f"{name}_ms": limit for name, limit in named})


def _endpoint(flags: argparse.Namespace) -> Endpoint:
    is_agents = flags.workload == WorkloadKind.AGENT_SESSIONS
    return Endpoint(flags.endpoint or (Endpoint.CHAT if is_agents else Endpoint.COMPLETIONS))


def _shape(flags: argparse.Namespace, chosen: dict[str, Any], is_text: bool) -> Shape:
    if is_text and not flags.text and flags.vocab_size is not None:
        raise UsageError("--vocab-size is of token ids, which chats and responses do not have")
    return Shape(
        kind=WorkloadKind(chosen["workload"]),
        prompt_len=chosen["prompt_len"],
        output_len=chosen["output_len"],
        prefix_len=chosen["prefix_len"],
        long_prompt_len=chosen["long_prompt_len"],
        long_output_len=chosen["long_output_len"],
        num_turns=chosen["turns"],
        system_len=chosen["system_len"],
        num_tools=chosen["tools"],
        vocab_size=chosen["vocab_size"],
        is_text=is_text,
    )


def _wire(flags: argparse.Namespace, endpoint: Endpoint) -> WireOptions:
    key = flags.api_key or next((os.environ[name] for name in API_KEY_VARIABLES if os.environ.get(name)), "")
    if not (key.isascii() and key.isprintable()):
        raise UsageError("the API key is not printable ASCII")
    return WireOptions(
        model=flags.model or "",
        endpoint=endpoint,
        api_key=key,
        headers=dict(flags.header),
        temperature=flags.temperature,
        ignore_eos=flags.ignore_eos,
        include_usage=flags.include_usage,
        expects_done=flags.done,
        extra_body=flags.extra_body,
        timeout_s=flags.timeout,
        retry_429=flags.retry_429,
    )
