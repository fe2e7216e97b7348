"""`python -m benchmarks.linear`: linear layers on this CPU, against the machine's ceilings and against torch.

With few rows a linear layer should read its weights at the speed of memory, with many it should multiply at the speed
of the cores. Both ceilings are measured in the same run, and contenders take turns, so the ratios hold on a busy
machine, too. Every call takes another layer's weights, as in a model, so that few rows read memory and no cache.

`docs/kernels.md` has the conclusions: what bounds the kernels, and what did not help.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.command import exit_with
from engine.kernels import load_kernels
from engine.model.machine_ceilings import matmul_dtype
from engine.weights.affine_quantization import BITS
from engine.weights.packed_weight import KernelWeight
from engine.weights.packing_policy import packing_for
from loadtest.numbers import positive_number

HEAD = (32_000, 896)
SHAPES = ((4864, 896), (896, 4864), (1152, 896), (896, 896), HEAD)  # N x K, of a 0.5 B model
ROWS = (1, 4, 8, 32, 128, 512)
WEIGHT_BYTES = 96 << 20  # of all layers of one shape together
CALLS = 3  # in each turn of a contender
REST_S = 0.02  # between turns: torch's threads spin for 13 ms after a job, and would slow the kernels' own down
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Layers:
    """Several layers of one shape, packed for every contender in its own layout."""

    def __init__(self, num_out: int, num_in: int, dtype: torch.dtype, quantization: str) -> None:
        self.num_in, self.dtype = num_in, dtype
        packing = packing_for(quantization, kernels_available=True)
        pack = packing.head if (num_out, num_in) == HEAD else packing.layers
        self.weight_bytes = pack(torch.randn(num_out, num_in, dtype=dtype)).nbytes
        count = max(2, WEIGHT_BYTES // self.weight_bytes)
        plain = [torch.randn(num_out, num_in, dtype=dtype) for _ in range(count)]
        self._weights: dict[str, list[Any]] = {"twostep": [pack(weight) for weight in plain]}
        if quantization != "none":
            self._weights["dense"] = [KernelWeight(weight) for weight in plain]
        else:
            if self._weights["twostep"][0].packed.dtype != dtype:
                self._weights["not coded"] = [KernelWeight(weight, may_be_coded=False) for weight in plain]
            if matmul_dtype(plain[0].device, dtype) is dtype:  # in emulated bfloat16 they take a hundred times as long
                self._weights["oneDNN"] = [torch.ops.mkldnn._reorder_linear_weight(weight, 64) for weight in plain]
                self._weights["torch"] = plain

    def contenders(self, rows: int) -> dict[str, Callable[[], Tensor]]:
        """Returns each contender by name, as a function that multiplies `rows` rows by the next layer's weight."""
        x = torch.randn(rows, self.num_in, dtype=self.dtype)
        multiply: dict[str, Callable[[Any], Tensor]] = {
            "twostep": lambda weight: weight.multiply(x, None),
            "dense": lambda weight: weight.multiply(x, None),
            "not coded": lambda weight: weight.multiply(x, None),
            "oneDNN": lambda weight: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""),
            "torch": lambda weight: linear(x, weight),
        }
        return {name: _each_in_turn(multiply[name], weights) for name, weights in self._weights.items()}


def _each_in_turn(multiply: Callable[[Any], Tensor], weights: Sequence[Any]) -> Callable[[], Tensor]:
    turns = itertools.cycle(weights)
    return lambda: multiply(next(turns))


def best_seconds(contenders: Mapping[str, Callable[[], object]], budget_s: float) -> dict[str, float]:
    """Returns each contender's fastest call; they take turns until the budget is spent, at least three times."""
    best = dict.fromkeys(contenders, math.inf)
    end = time.perf_counter() + budget_s
    for turn in itertools.count():
        if turn > 3 and time.perf_counter() > end:
            return best
        for name, call in contenders.items():
            time.sleep(REST_S)
            seconds = min(_seconds(call) for _ in range(CALLS))
            best[name] = min(best[name], seconds) if turn else math.inf  # the first turn warms up
    return best


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclass
class Ceilings:
    """The machine's ceilings: the best of all measurements so far, since other processes may have disturbed some."""

    dtype: torch.dtype
    read: float = 0.0  # bytes per second
    matmul: float = 0.0  # operations per second of torch's matmul

    def measure(self, budget_s: float) -> None:
        buffer = torch.ones(256 << 18)
        a, b = torch.randn(2, 2048, 2048).to(matmul_dtype(torch.device("cpu"), self.dtype))
        best = best_seconds({"read": buffer.sum, "matmul": lambda: a @ b}, budget_s)
        self.read = max(self.read, buffer.nbytes / best["read"])
        self.matmul = max(self.matmul, 2 * 2048**3 / best["matmul"])


@dataclass(frozen=True)
class Result:
    """The best times, in seconds, of one shape and number of rows."""

    num_out: int
    num_in: int
    rows: int
    weight_bytes: int
    best: dict[str, float]


def measure_all(ceilings: Ceilings, quantization: str, seconds: float) -> Iterator[Result]:
    for num_out, num_in in track(SHAPES, "measuring", console=Console(stderr=True), transient=True):
        ceilings.measure(seconds)
        layers = Layers(num_out, num_in, ceilings.dtype, quantization)
        for rows in ROWS:
            best = best_seconds(layers.contenders(rows), seconds)
            yield Result(num_out, num_in, rows, layers.weight_bytes, best)


def table_of(results: Sequence[Result], ceilings: Ceilings) -> Table:
    """Returns a table with a line for each shape and number of rows."""
    table = Table()
    others = [name for name in results[0].best if name != "twostep"]
    for heading in ("N x K", "rows", "GB/s", "of read", "GFLOP/s", "of matmul", *(f"vs {name}" for name in others)):
        table.add_column(heading, justify="left" if heading == "N x K" else "right")
    for result in results:
        ours, weights = result.best["twostep"], result.num_out * result.num_in
        bandwidth, speed = result.weight_bytes / ours, 2 * result.rows * weights / ours
        table.add_row(
            f"{result.num_out} x {result.num_in}" if result.rows == ROWS[0] else "",
            str(result.rows),
            f"{bandwidth / 1e9:.1f}",
            f"{bandwidth / ceilings.read:.0%}",
            f"{speed / 1e9:.0f}",
            f"{speed / ceilings.matmul:.0%}",
            *(f"{result.best[name] / ours:.2f}x" for name in others),
            end_section=result.rows == ROWS[-1],
        )
    return table


def print_results(isa: str, ceilings: Ceilings, table: Table) -> None:
    """Prints the table below what it was measured with."""
    print(f"kernels for {isa}, {torch.get_num_threads()} threads; measured ceilings: ", end="")
    multiplied_dtype = str(matmul_dtype(torch.device("cpu"), ceilings.dtype)).removeprefix("torch.")
    print(f"read {ceilings.read / 1e9:.1f} GB/s, {multiplied_dtype} matmul {ceilings.matmul / 1e9:.0f} GFLOP/s")
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def main(arguments: list[str] | None = None) -> int:
    """Prints a table of shapes; returns 1 when there are no kernels to measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--quantization", choices=["none", *BITS], default="none", help="compared with dense weights")
    parser.add_argument(
        "--seconds", type=positive_number, default=1.0, help="spent on each line of the table (default: 1)"
    )
    options = parser.parse_args(arguments)
    kernels = load_kernels()
    if kernels is None:
        print("no CPU kernels: nothing to measure", file=sys.stderr)
        return 1
    ceilings = Ceilings(DTYPES[options.dtype])
    results = list(measure_all(ceilings, options.quantization, options.seconds))
    print_results(kernels.isa, ceilings, table_of(results, ceilings))
    return 0


if __name__ == "__main__":
    exit_with(main)
