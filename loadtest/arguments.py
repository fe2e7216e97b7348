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
)
from loadtest.datasets.entries import Dataset
from loadtest.datasets.file import read_dataset
from loadtest.endpoints import Endpoint, WireOptions
from loadtest.errors import UsageError
from loadtest.flags import flag_parser
from loadtest.stats import Targets
from loadtest.workload import Shape, WorkloadKind

_NOT_WITH_DATASET = (
    "scenario",
    "workload",
    "prompt_len",
    "prefix_len",
    "long_prompt_len",
    "long_output_len",
    "long_every",
)
_ONLY_WITH_DATASET = ("arrivals", "speedup", "salt")


def parse_config(arguments: Sequence[str] | None) -> Config:
    """Returns the config of the command line (None: sys.argv).

    Raises UsageError for flags that do not go together; argparse ends the program for other errors.
    """
    flags = flag_parser().parse_args(arguments)
    dataset = _dataset(flags)
    chosen = _with_defaults(flags, dataset)
    schedule = Schedule(
        concurrency=chosen.get("concurrency"),
        rate_per_s=flags.rate,
        num_requests=chosen.get("requests"),
        duration_s=flags.duration,
        num_warmup=flags.warmup,
        long_every_s=chosen["long_every"],
        keeps_arrivals=_keeps_arrivals(flags, dataset),
        speedup=flags.speedup or 1.0,
    )
    return Config(
        urls=tuple(flags.urls),
        seed=random.SystemRandom().randrange(2**32) if flags.seed is None else flags.seed,
        scenario=flags.scenario,
        rounds=flags.rounds or (1 if len(flags.urls) == 1 else 2),
        shape=_shape(flags, chosen),
        dataset=dataset,
        is_salted=flags.salt is not False,
        schedule=schedule,
        wire=_wire(flags),
        targets=Targets(flags.target_ttft_ms, flags.target_itl_ms),
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


def _dataset(flags: argparse.Namespace) -> Dataset | None:
    """Returns the requests of --dataset; raises UsageError for flags that do not go with it, or not without it."""
    names = _NOT_WITH_DATASET if flags.dataset else _ONLY_WITH_DATASET
    if wrong := [name for name in names if getattr(flags, name) is not None]:
        flag = f"--{wrong[0].replace('_', '-')}"
        raise UsageError(f"{flag} does not go with --dataset" if flags.dataset else f"{flag} belongs to --dataset")
    if not flags.dataset:
        return None
    dataset = read_dataset(flags.dataset, Endpoint(flags.endpoint), flags.requests)
    if flags.vocab_size is not None and not dataset.is_traced:
        raise UsageError("--vocab-size is of prompts that are drawn, and the file has its own")
    return dataset


def _keeps_arrivals(flags: argparse.Namespace, dataset: Dataset | None) -> bool:
    has_arrivals = dataset is not None and dataset.has_arrivals
    if flags.arrivals and not has_arrivals:
        raise UsageError("--arrivals: the file has no arrival times")
    keeps = has_arrivals and flags.arrivals is not False and flags.rate is None
    if (flags.arrivals and flags.rate is not None) or (flags.speedup is not None and not keeps):
        raise UsageError("--arrivals and --speedup are of a file's arrival times, which --rate takes the place of")
    return keeps


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
    if "rate" not in explicit and not _keeps_arrivals(flags, dataset):
        chosen.setdefault("concurrency", 1)
    if dataset is not None:
        chosen["requests"] = len(dataset.entries)
    elif "duration" not in explicit:
        chosen.setdefault("requests", chosen["concurrency"] if is_long else DEFAULT_NUM_REQUESTS)
    return chosen


def _shape(flags: argparse.Namespace, chosen: dict[str, Any]) -> Shape:
    is_text = flags.text or flags.endpoint != Endpoint.COMPLETIONS
    if is_text and flags.vocab_size is not None:
        raise UsageError("--vocab-size is of token ids, which chat, responses and --text do not send")
    return Shape(
        kind=WorkloadKind(chosen["workload"]),
        prompt_len=chosen["prompt_len"],
        output_len=chosen["output_len"],
        prefix_len=chosen["prefix_len"],
        long_prompt_len=chosen["long_prompt_len"],
        long_output_len=chosen["long_output_len"],
        vocab_size=chosen["vocab_size"],
        is_text=is_text,
    )


def _wire(flags: argparse.Namespace) -> WireOptions:
    key = flags.api_key or next((os.environ[name] for name in API_KEY_VARIABLES if os.environ.get(name)), "")
    if not (key.isascii() and key.isprintable()):
        raise UsageError("the API key is not printable ASCII")
    return WireOptions(
        model=flags.model or "",
        endpoint=Endpoint(flags.endpoint),
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
