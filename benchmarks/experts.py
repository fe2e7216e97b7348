"""`python -m benchmarks.experts`: the experts of a mixture on this CPU, against the machine's ceilings.

With few rows the chosen experts' weights should be read at the speed of memory, with many they should be multiplied at
the speed of the cores. Both ceilings are measured in the same run. Rows choose at random, and every call takes another
layer's experts, as in a model.

`docs/kernels.md` has the conclusions.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from benchmarks.command import exit_with
from benchmarks.linear import Ceilings, best_seconds, print_results
from engine.kernels import load_kernels
from engine.weights.affine_quantization import BITS
from engine.weights.moe import PackedExperts
from engine.weights.packing_policy import packing_for
from loadtest.numbers import positive, positive_number


@dataclass(frozen=True)
class Shape:
    """A layer's experts: rows of `hidden` numbers, each with `chosen` of `experts` of `size` numbers."""

    hidden: int
    size: int
    experts: int
    chosen: int


SHAPES = (Shape(1024, 512, 32, 4), Shape(1024, 512, 64, 8))  # of 0.9 B parameters, with 16 and 8 layers
ROWS = (1, 4, 8, 16, 32, 128, 512, 2048)
WEIGHT_BYTES = 384 << 20  # of all layers of a shape together
FORMATS = ("none", *BITS)


class Layers:
    """Several layers of one shape."""

    def __init__(self, shape: Shape, quantization: str) -> None:
        self.shape = shape
        packing = packing_for(quantization, kernels_available=True)
        config = Qwen3MoeConfig(
            hidden_size=shape.hidden, moe_intermediate_size=shape.size, num_experts=shape.experts, hidden_act="silu"
        )
        self.layers: list[PackedExperts] = []
        while len(self.layers) < 2 or self.nbytes < WEIGHT_BYTES:
            experts = Qwen3MoeExperts(config).to(torch.bfloat16)
            for weight in experts.parameters():
                torch.nn.init.normal_(weight, std=0.02)
            self.layers.append(PackedExperts(experts, packing.layers))

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def call(self, rows: int) -> tuple[Callable[[], Tensor], float]:
        """Returns a function that runs the next layer on `rows` rows, and how many experts they choose on average."""
        shape = self.shape
        x = torch.randn(rows, shape.hidden, dtype=torch.bfloat16)
        choices = [torch.rand(rows, shape.experts).topk(shape.chosen).indices for _ in self.layers]
        weights = torch.full((rows, shape.chosen), 1 / shape.chosen, dtype=torch.bfloat16)
        turns = itertools.cycle(zip(self.layers, choices, strict=True))

        def run() -> Tensor:
            layer, chosen = next(turns)
            return layer.forward(x, chosen, weights)

        return run, sum(len({*each.flatten().tolist()}) for each in choices) / len(choices)


@dataclass(frozen=True)
class Result:
    """The best time of one shape and number of rows."""

    shape: Shape
    rows: int
    seconds: float
    read_bytes: float
    """Bytes of the experts that were chosen."""

    @property
    def operations(self) -> int:
        shape = self.shape
        return 2 * self.rows * shape.chosen * 3 * shape.hidden * shape.size


def measure_all(ceilings: Ceilings, quantization: str, seconds: float, all_rows: Sequence[int]) -> Iterator[Result]:
    for shape in track(SHAPES, "measuring", console=Console(stderr=True), transient=True):
        layers = Layers(shape, quantization)
        ceilings.measure(seconds)
        nbytes = layers.nbytes / len(layers.layers) / shape.experts  # of an expert
        for rows in all_rows:
            run, num_chosen = layers.call(rows)
            yield Result(shape, rows, best_seconds({"twostep": run}, seconds)["twostep"], num_chosen * nbytes)


def table_of(results: Sequence[Result], ceilings: Ceilings) -> Table:
    """Returns a table with a line for each shape and number of rows."""
    table = Table()
    for heading in ("experts", "rows", "us", "GB/s", "of read", "GFLOP/s", "of matmul"):
        table.add_column(heading, justify="left" if heading == "experts" else "right")
    for result in results:
        shape, is_first = result.shape, result.rows == results[0].rows
        bandwidth, speed = result.read_bytes / result.seconds, result.operations / result.seconds
        table.add_row(
            f"{shape.chosen} of {shape.experts}, {shape.hidden} x {shape.size}" if is_first else "",
            str(result.rows),
            f"{result.seconds * 1e6:.0f}",
            f"{bandwidth / 1e9:.1f}",
            f"{bandwidth / ceilings.read:.0%}",
            f"{speed / 1e9:.0f}",
            f"{speed / ceilings.matmul:.0%}",
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    """Prints a table of shapes; returns 1 when there are no kernels to measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--quantization", choices=FORMATS, default="none")
    parser.add_argument("--rows", type=positive, nargs="+", default=ROWS)
    parser.add_argument(
        "--seconds", type=positive_number, default=1.0, help="spent on each line of the table (default: 1)"
    )
    options = parser.parse_args(arguments)
    kernels = load_kernels()
    if kernels is None:
        print("no CPU kernels: nothing to measure", file=sys.stderr)
        return 1
    ceilings = Ceilings(torch.bfloat16)
    with torch.inference_mode():
        results = list(measure_all(ceilings, options.quantization, options.seconds, options.rows))
    print_results(kernels.isa, ceilings, table_of(results, ceilings))
    return 0


if __name__ == "__main__":
    exit_with(main)
