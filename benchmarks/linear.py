"""`python -m benchmarks.linear`: linear layers on this CPU, against what the machine can do and against torch.

With few rows a linear layer should read its weights at the speed of memory, with many it should multiply at the speed
of the cores. Both ceilings are measured in the same run, and contenders take turns, so the ratios hold on a busy
machine, too. Every call takes another layer's weights, as in a model, so that few rows read memory and no cache.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear

from engine.kernels import load_kernels
from engine.packed_weight import KernelWeight

SHAPES = ((4864, 896), (896, 4864), (1152, 896), (896, 896), (32_000, 896))  # N x K, of a 0.5 B model
ROWS = (1, 4, 8, 32, 128, 512)
WEIGHT_BYTES = 96 << 20  # of all layers of one shape together
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Layers:
    """Several layers of one shape, held by every contender in a form of its own."""

    def __init__(self, num_out: int, num_in: int, dtype: torch.dtype) -> None:
        self.weight_bytes = num_out * num_in * dtype.itemsize
        self.num_in, self.dtype = num_in, dtype
        count = max(2, WEIGHT_BYTES // self.weight_bytes)
        self._plain = [torch.randn(num_out, num_in, dtype=dtype) for _ in range(count)]
        self._packed = [KernelWeight(weight) for weight in self._plain]
        self._onednn = [torch.ops.mkldnn._reorder_linear_weight(weight, 64) for weight in self._plain]

    def contenders(self, rows: int) -> dict[str, Callable[[], Tensor]]:
        """Name -> one call on `rows` rows, each with the next layer's weight."""
        x = torch.randn(rows, self.num_in, dtype=self.dtype)
        packed, onednn, plain = map(itertools.cycle, (self._packed, self._onednn, self._plain))
        return {
            "twostep": lambda: next(packed).multiply(x, None),
            "oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(x, next(onednn), None, "none", [], ""),
            "torch": lambda: linear(x, next(plain)),
        }


def best_seconds(contenders: Mapping[str, Callable[[], object]], budget_s: float) -> dict[str, float]:
    """Each one's fastest call; they take turns until the budget is spent, at least three times."""
    best = dict.fromkeys(contenders, math.inf)
    end = time.perf_counter() + budget_s
    for turn in itertools.count():
        if turn > 3 and time.perf_counter() > end:
            return best
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            best[name] = min(best[name], seconds) if turn else math.inf  # the first turn warms up
    return best


@dataclass
class Ceilings:
    """What the machine can do, the best of all measurements so far: another process may have disturbed one."""

    dtype: torch.dtype
    read: float = 0.0  # bytes per second
    matmul: float = 0.0  # operations per second of torch's matrix product

    def measure(self, budget_s: float) -> None:
        buffer = torch.ones(256 << 18)
        a, b = torch.randn(2, 2048, 2048).to(self.dtype)
        best = best_seconds({"read": buffer.sum, "matmul": lambda: a @ b}, budget_s)
        self.read = max(self.read, buffer.nbytes / best["read"])
        self.matmul = max(self.matmul, 2 * 2048**3 / best["matmul"])


@dataclass(frozen=True)
class Result:
    """The best times, in seconds, of one shape and number of rows."""

    num_out: int
    num_in: int
    rows: int
    best: dict[str, float]


def measure_all(ceilings: Ceilings, seconds: float) -> Iterator[Result]:
    for num_out, num_in in track(SHAPES, "measuring", console=Console(stderr=True), transient=True):
        ceilings.measure(seconds)
        layers = Layers(num_out, num_in, ceilings.dtype)
        for rows in ROWS:
            yield Result(num_out, num_in, rows, best_seconds(layers.contenders(rows), seconds))


def table_of(results: Sequence[Result], ceilings: Ceilings) -> Table:
    """One line per shape and number of rows."""
    table = Table()
    for heading in ("N x K", "rows", "GB/s", "of read", "GFLOP/s", "of matmul", "vs oneDNN", "vs torch"):
        table.add_column(heading, justify="left" if heading == "N x K" else "right")
    for result in results:
        ours, weights = result.best["twostep"], result.num_out * result.num_in
        bandwidth, speed = weights * ceilings.dtype.itemsize / ours, 2 * result.rows * weights / ours
        table.add_row(
            f"{result.num_out} x {result.num_in}" if result.rows == ROWS[0] else "",
            str(result.rows),
            f"{bandwidth / 1e9:.1f}",
            f"{bandwidth / ceilings.read:.0%}",
            f"{speed / 1e9:.0f}",
            f"{speed / ceilings.matmul:.0%}",
            f"{result.best['oneDNN'] / ours:.2f}x",
            f"{result.best['torch'] / ours:.2f}x",
            end_section=result.rows == ROWS[-1],
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    """Prints a table; 1 when there are no kernels to measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=(__doc__ or "").split("\n")[2])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--seconds", type=float, default=1.0, help="spent on each line of the table (default: 1)")
    options = parser.parse_args(arguments)
    kernels = load_kernels()
    if kernels is None:
        print("no CPU kernels: nothing to measure", file=sys.stderr)
        return 1
    ceilings = Ceilings(DTYPES[options.dtype])
    results = list(measure_all(ceilings, options.seconds))
    print(f"kernels for {kernels.isa}, {torch.get_num_threads()} threads; measured ceilings: ", end="")
    print(f"read {ceilings.read / 1e9:.1f} GB/s, {options.dtype} matmul {ceilings.matmul / 1e9:.0f} GFLOP/s")
    Console(width=None if sys.stdout.isatty() else 100).print(table_of(results, ceilings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
