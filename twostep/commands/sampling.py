"""Sampling flags of the commands that ask a model."""

import argparse
from typing import Any

__all__ = ["PARAMETERS", "add_sampling_flags", "sampling_of"]

PARAMETERS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "repetition_penalty": float,
}
"""Parameters of a request that may be set, and the type of each."""


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "Without these, the model's own defaults.")
    for name, kind in PARAMETERS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N")


def sampling_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """Returns the parameters that were given."""
    return {name: value for name in PARAMETERS if (value := getattr(parsed, name)) is not None}
