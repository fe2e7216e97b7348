"""`python -m benchmarks.linear`: linear layers on this CPU, against what the machine can do and against torch.

With few rows a linear layer should read its weights at the speed of memory, with many it should multiply at the speed
of the cores. Both ceilings are measured in the same run, and contenders take turns, so the ratios hold on a busy
machine, too. Every call takes another layer's weights, as in a model, so that few rows read memory and no cache.

Many rows are bound by the L2 cache: four tiles of operands take 17 ns to multiply and 40 ns to load from there, so
pieces along K are short enough for the L1 cache. Pieces of 320 to 448 instead of 256, and blocks of 16 panels, were
slower; prefetches gained little in pages of 4 KiB, and nothing where they asked for every second line only. A function
pointer in the place of an `if` cost a fifth. For few rows each thread reads a run of panels of its own: handing them
out in turn made steps of one row 2 % slower in bfloat16, 6 % with 8 bits and 12 % with 4.

With AVX512, numbers of bfloat16 lie in 12 bits, exactly (`kernels/coded_numbers.h`), and are expanded on the way. With
AMX a step of 32 columns and 32 of K takes 17 ns to expand, 53 to read, and its products for 32 rows 28, most of it at
the same time. One row takes 0.75 to 0.8 times as long as without, 32 rows 0.83, more than 64 rows 1.03 to 1.08: they
are bound by arithmetic. Expanding whole pieces before they are multiplied made one row 15 % slower; into a buffer of
all pieces of a block, which does not fit into the L1 cache, expanding took 43 ns. With vectors 1 to 12 rows take 0.76
times as long, 32 rows 1.03, 256 rows 1.02.

Vectors: where rows do not fit into one tile, what matters is that memory never rests. Reading a panel in the first pass
over it and multiplying in the others took 12 rows a third longer than one; now each pass asks for a share of the next
piece. A share must be spread over the whole pass: two lines a step, and none at its end, cost a fifth. Tiles of 8 rows
and 48 columns were as fast as 6 and 64, but a panel of 48 has gates without their partners and no whole unit of coded
numbers. Pieces of 64 to 256 pairs along K, and tasks of 96 to 512 rows, differed by less than the noise, 64 pairs aside
(5 % slower). Without a dot product of bfloat16, pairs along K widen with one instruction where a column of K took two:
many rows took a fifth less time with AVX512, a third with AVX2.

Quantized layers multiply integers. For a few rows, memory is slower than that: codes of 8 bits are multiplied where
they lie, which reads at the speed of memory, where expanding them to bfloat16 took 1.3 times as long. For many rows AMX
tiles multiply, and what their sums cost decides: of 115 ns for 16 rows, 32 columns and 128 along K at 8 bits, products
take 75, storing their sums 13 and scaling them 27, and none of it overlaps, for after an instruction of tiles a core's
vector units run at half their rate for a while. So scales are shared by 256 along K: sums per 128 took 30 % longer, per
64 (at 4 bits) twice as long. Narrower vectors, smaller shares between products, one more group between products and
their sums, and tiles that are not cleared made no difference.

Without AMX, vectors multiply integers of many rows, too, and loads decided: for each column tile by itself 12 products
took 13 loads, and both tiles of a panel at once take 14 for 24. That and, at 4 bits, expanding a panel once for 128
rows and not in every pass took 128 rows from 814 to 587 us at 8 bits and from 523 to 374 at 4 (2,048 columns and 896
along K, in the L2 cache).

Panels of integers that come from memory are read as they lie there: both tiles at once, a kilobyte apart, one row read
them at 0.77 of the rate of torch's sum, not 0.87, and 8 rows at 0.68, not 0.80.

How bytes are asked for counts as much. Few rows ask for every line, 1 KiB ahead into the L1 and 3 KiB into the L2
cache. Tiles take a step's bytes at once and pause: they ask for the next piece, a share with each step, into the L2
cache, which read up to a fifth faster than asking 1 to 14 KiB ahead in either cache. Coded panels of one tile of rows
are read as evenly as by vectors, and ask like those. Asking past the L2 cache (`prefetchnta`), to leave it to rows and
sums, made a step of one row take 1.8 times as long. Threads that wait while another one attends can ask for the first
512 KiB of what they multiply next: 1 %, not worth its code. Many rows that another core has just written cost the layer
after a gated one 15 %; asking for those of the next piece saved that, and cost as much where they were at hand.
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

from engine.kernels import load_kernels
from engine.packed_weight import KernelWeight
from engine.packing import packing_for
from engine.quantization import BITS

HEAD = (32_000, 896)
SHAPES = ((4864, 896), (896, 4864), (1152, 896), (896, 896), HEAD)  # N x K, of a 0.5 B model
ROWS = (1, 4, 8, 32, 128, 512)
WEIGHT_BYTES = 96 << 20  # of all layers of one shape together
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Layers:
    """Several layers of one shape, held by every contender in a form of its own."""

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
            self._weights["oneDNN"] = [torch.ops.mkldnn._reorder_linear_weight(weight, 64) for weight in plain]
            self._weights["torch"] = plain

    def contenders(self, rows: int) -> dict[str, Callable[[], Tensor]]:
        """Name -> one call on `rows` rows, each with the next layer's weight."""
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
    """One line per shape and number of rows."""
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


def main(arguments: list[str] | None = None) -> int:
    """Prints a table; 1 when there are no kernels to measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--quantization", choices=["none", *BITS], default="none", help="compared with dense weights")
    parser.add_argument("--seconds", type=float, default=1.0, help="spent on each line of the table (default: 1)")
    options = parser.parse_args(arguments)
    kernels = load_kernels()
    if kernels is None:
        print("no CPU kernels: nothing to measure", file=sys.stderr)
        return 1
    ceilings = Ceilings(DTYPES[options.dtype])
    results = list(measure_all(ceilings, options.quantization, options.seconds))
    print(f"kernels for {kernels.isa}, {torch.get_num_threads()} threads; measured ceilings: ", end="")
    print(f"read {ceilings.read / 1e9:.1f} GB/s, {options.dtype} matmul {ceilings.matmul / 1e9:.0f} GFLOP/s")
    Console(width=None if sys.stdout.isatty() else 100).print(table_of(results, ceilings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
