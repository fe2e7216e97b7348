"""The flags of `--dataset`, and which others go with them."""

import argparse

from loadtest.datasets.entries import Dataset
from loadtest.datasets.file import read_dataset
from loadtest.endpoints import Endpoint
from loadtest.errors import UsageError
from loadtest.numbers import positive_number

_OWN = ("arrivals", "speedup", "salt")
_OTHERS = ("scenario", "workload", "prompt_len", "prefix_len", "long_prompt_len", "long_output_len", "long_every")


def add_dataset_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dataset", metavar="FILE", help="send the requests of FILE, in its order: see below")
    add(
        "--arrivals",
        action=argparse.BooleanOptionalAction,
        help="send each request at its arrival time, if the file has them; --no-arrivals: a closed loop",
    )
    add("--speedup", type=positive_number, metavar="F", help="divide arrival times by F (default 1)")
    add(
        "--salt",
        action=argparse.BooleanOptionalAction,
        help="begin every prompt of the file with a mark of its run, so that no prefix cache knows it from another "
        "(the default); --no-salt: as in the file",
    )


def dataset_of(flags: argparse.Namespace, endpoint: Endpoint) -> Dataset | None:
    """Returns the requests of --dataset; raises UsageError for flags that do not go with it, or not without it."""
    wrong = [name for name in (_OTHERS if flags.dataset else _OWN) if getattr(flags, name) is not None]
    if wrong:
        flag = f"--{wrong[0].replace('_', '-')}"
        raise UsageError(f"{flag} does not go with --dataset" if flags.dataset else f"{flag} belongs to --dataset")
    if not flags.dataset:
        return None
    dataset = read_dataset(flags.dataset, endpoint, flags.requests)
    if flags.vocab_size is not None and not dataset.is_traced:
        raise UsageError("--vocab-size is of prompts that are drawn, and the file has its own")
    return dataset


def keeps_arrivals(flags: argparse.Namespace, dataset: Dataset | None) -> bool:
    """Whether requests are sent at the file's arrival times; raises UsageError where they cannot be, but were to."""
    has_arrivals = dataset is not None and dataset.has_arrivals
    if flags.arrivals and not has_arrivals:
        raise UsageError("--arrivals: the file has no arrival times")
    keeps = has_arrivals and flags.arrivals is not False and flags.rate is None
    if (flags.arrivals and flags.rate is not None) or (flags.speedup is not None and not keeps):
        raise UsageError(
            "--arrivals and --speedup are of a file's arrival times, which --rate and --sweep take the place of"
        )
    return keeps
