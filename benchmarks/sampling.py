"""The time to sample the tokens of a step, by sampling parameters, with the kernels of a device and in plain torch.

The logits are random, as flat as those of a model that is unsure: a nucleus holds thousands of tokens. The floor is
the time to read them once from memory; they are in the CPU's caches, so a step may be below it. On CUDA a step's time
is that until its tokens are on the host; launches, which a model's step hides, are in it.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.command import exit_with
from engine.core.batch import ScheduledRequest
from engine.core.sampling_params import SamplingParams
from engine.kernels import load_kernels
from engine.model.machine_ceilings import measure_ceilings
from engine.runner.sampler import Sampler
from engine.runner.sampler_choice import choose_sampler
from loadtest.numbers import positive

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "0.7, top_k 20, top_p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top_p 0.95": {"top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "temperature 9, top_p 0.95": {"temperature": 9.0, "top_p": 0.95},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.5},
}


def rows_of(way: dict[str, Any], num_rows: int) -> list[ScheduledRequest]:
    return [
        ScheduledRequest(
            request_id=str(row),
            token_ids=[1],
            start=320,
            block_table=(),
            params=SamplingParams(seed=row, **way),
            prompt_token_ids=range(256),
            output_token_ids=range(100, 164),
            samples=True,
        )
        for row in range(num_rows)
    ]


def milliseconds(sampler: Sampler, logits: Tensor, requests: Sequence[ScheduledRequest], repeats: int) -> float:
    """Returns the median time of `repeats` steps, after one that compiles kernels where it must."""
    sampler.sample(logits, requests)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        sampler.sample(logits, requests)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def table_of(num_rows: int, vocab_size: int, repeats: int, device: torch.device) -> Table:
    logits = (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 2.5).bfloat16()
    logits = logits.to(device)
    floor_ms = logits.nbytes / measure_ceilings(device, torch.bfloat16, 1 << 30).read_bytes_per_s * 1e3
    table = Table(title=f"{num_rows} rows of {vocab_size:,} logits: ms a step; reading them takes {floor_ms:.2f}")
    samplers = {"torch": Sampler(device, has_kernels=False, eos_token_ids=())}
    if device.type == "cuda" or load_kernels() is not None:
        samplers = {"kernels": choose_sampler(device, has_kernels=True, eos_token_ids=()), **samplers}
    for column in ("", *samplers):
        table.add_column(column, justify="right" if column else "left")
    for name, way in WAYS.items():
        requests = rows_of(way, num_rows)
        table.add_row(name, *(f"{milliseconds(each, logits, requests, repeats):.2f}" for each in samplers.values()))
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling", description=__doc__)
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocab-size", type=positive, default=151_936)
    parser.add_argument("--repeats", type=positive, default=7)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args(arguments)
    for num_rows in options.rows:
        Console().print(table_of(num_rows, options.vocab_size, options.repeats, torch.device(options.device)))
    return 0


if __name__ == "__main__":
    exit_with(main)
