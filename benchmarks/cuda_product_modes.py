"""What `python -m benchmarks.cuda_products` measures and checks. Imports Triton."""

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from benchmarks import cuda_timing
from engine.kernels.cuda.linear import Rows, SumOrder, Tile, linear, sum_order, tile_for
from engine.kernels.cuda.shared_memory import shared_bytes
from engine.weights.batch_invariant_matmul import BatchInvariantWeight, cancelling_operands
from engine.weights.triton_weight import TritonWeight

__all__ = ["MODES"]

Shapes = Mapping[str, tuple[int, int]]  # of weights, N x K, by name

DTYPE = torch.bfloat16
WEIGHT_BYTES = 300 << 20  # of all weights of one shape together: several times an L2 cache
BATCHES = ((0, 1), (2047, 1), (5, 3), (100, 17), (300, 64), (999, 200))  # first row and rows, of 2,048


class Launch(NamedTuple):
    """One way to multiply by a weight."""

    num_segments: int
    block_k: int
    tile: Tile

    def order(self, num_in: int) -> SumOrder:
        return SumOrder(self.block_k, -(-num_in // self.num_segments // 128) * 128)


def speed(shapes: Shapes, rows: Sequence[int]) -> int:
    """Prints the time of each product, with the bytes of the weight and the operations per second that come of it."""
    compile_all(default_launch(shape, num_rows) for shape in shapes.values() for num_rows in rows)
    print(f"{'weight':8} {'rows':>5} {'product':>14} {'us':>9} {'GB/s':>7} {'TFLOP/s':>8}")
    for name, (num_out, num_in) in shapes.items():
        weights = weights_of(num_out, num_in)
        contenders: dict[str, list[Callable[[Tensor], Tensor]]] = {
            "Triton": [_multiplied_by(TritonWeight(weight)) for weight in weights],
            "fixed tiles": [_multiplied_by(BatchInvariantWeight(weight)) for weight in weights],
            "torch": [_multiplied_in_torch(weight) for weight in weights],
        }
        for num_rows, (label, products) in itertools.product(rows, contenders.items()):
            us = microseconds(products, num_rows, num_in)
            numbers = num_out * num_in
            gigabytes, teraflops = numbers * DTYPE.itemsize / us / 1e3, 2 * num_rows * numbers / us / 1e6
            print(f"{name:8} {num_rows:5} {label:>14} {us:9.1f} {gigabytes:7.0f} {teraflops:8.1f}", flush=True)
    return 0


def sweep(shapes: Shapes, rows: Sequence[int]) -> int:
    """Prints the best launches of each weight and number of rows, and the present one."""
    cases = {(name, num_rows): candidates(shapes[name], num_rows) for name in shapes for num_rows in rows}
    compile_all(itertools.chain.from_iterable(cases.values()))
    for (name, num_rows), launches in cases.items():
        num_out, num_in = shapes[name]
        weights, present = weights_of(num_out, num_in), default_launch(shapes[name], num_rows)
        times = {}
        for launch in {*launches, present}:
            products = [_launched(weight, launch) for weight in weights]
            times[launch] = microseconds(products, num_rows, num_in)
        ranking = sorted(times, key=times.__getitem__)
        for place, launch in enumerate(ranking):
            if place < 4 or launch == present:
                what = "now " if launch == present else ""
                print(f"{name:8} {num_rows:5} {times[launch]:9.1f} us {what}{_described(launch)}", flush=True)
    return 0


def bits(shapes: Shapes, rows: Sequence[int]) -> int:
    """Checks that rows are the same alone, in batches and in every tile that `sweep` tries; prints what differs."""
    launches = {name: _launches_in_one_order(shapes[name], rows) for name in shapes}
    compile_all(itertools.chain.from_iterable(launches.values()))
    num_different = 0
    for name, (num_out, num_in) in shapes.items():
        x, weight = cancelling_operands(2048, torch.Size((num_out, num_in)), DTYPE, torch.device("cuda"))
        packed = TritonWeight(weight)
        whole = packed.multiply(x, None)
        different = [
            f"{count} rows from {start}"
            for start, count in BATCHES
            if not torch.equal(packed.multiply(x[start : start + count], None), whole[start : start + count])
        ]
        for launch in launches[name]:
            result = linear(_rows(x[:200]), weight, None, launch.order(num_in), launch.tile)
            if not torch.equal(result, whole[:200]):
                different.append(_described(launch))
        print(f"{name:8} {len(BATCHES)} batches, {len(launches[name])} tiles: {len(different)} differ", flush=True)
        for each in different:
            print(f"    {each}")
        print(f"    in steps of 128 along K: {_difference_in_steps_of_128(x, weight, whole)}")
        print(f"    error of random numbers: {_error(num_out, num_in):.2e}", flush=True)
        num_different += len(different)
    return 1 if num_different else 0


MODES: Mapping[str, Callable[[Shapes, Sequence[int]], int]] = {"speed": speed, "sweep": sweep, "bits": bits}


def weights_of(num_out: int, num_in: int) -> list[Tensor]:
    count = max(2, -(-WEIGHT_BYTES // (num_out * num_in * DTYPE.itemsize)))
    return [torch.randn(num_out, num_in, dtype=DTYPE, device="cuda") for _ in range(count)]


def microseconds(products: Sequence[Callable[[Tensor], Tensor]], num_rows: int, num_in: int) -> float:
    """Returns how long one product takes: the median of several runs of a graph with all of them."""
    x = torch.randn(num_rows, num_in, dtype=DTYPE, device="cuda")
    calls = [*products] * (1 if num_rows > 128 else max(1, 16 // len(products)))
    return cuda_timing.microseconds([functools.partial(multiply, x) for multiply in calls])


def default_launch(shape: tuple[int, int], num_rows: int) -> Launch:
    num_out, num_in = shape
    order = sum_order(num_out, num_in, DTYPE)
    num_segments = order.num_segments(num_in)
    tile = tile_for(num_rows, num_out, num_segments, DTYPE, shared_bytes(torch.device("cuda")))
    return Launch(num_segments, order.block_k, tile)


def candidates(shape: tuple[int, int], num_rows: int) -> list[Launch]:
    """Returns the launches that may be good for a weight [N, K] and so many rows."""
    num_out, num_in = shape
    segments = [each for each in (1, 2, 4, 8) if each == 1 or (each * num_out <= 32768 and num_in // each >= 1024)]
    found = []
    for num_segments, (block_k, tile) in itertools.product(segments, _tiles(num_rows)):
        is_parallel = num_segments > 1 and (num_rows <= 128 or tile.block_t == 256)
        stage_bytes = (tile.block_n + tile.block_t) * block_k * DTYPE.itemsize
        if tile.num_stages * stage_bytes < shared_bytes(torch.device("cuda")):
            found.append(Launch(num_segments, block_k, tile._replace(has_parallel_segments=is_parallel)))
    return found


def _tiles(num_rows: int) -> Iterator[tuple[int, Tile]]:
    """Yields steps along K and tiles for so many rows."""
    if num_rows <= 64:
        block_t = max(16, num_rows)
        for block_k, stages in ((64, (4, 6, 8)), (128, (3, 4))):
            yield from ((block_k, Tile(64, block_t, 4, each, False)) for each in stages)
            yield from ((block_k, Tile(128, block_t, warps, each, False)) for warps in (4, 8) for each in stages)
    elif num_rows <= 128:
        for block_n, block_t, num_warps in ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8)):
            yield from ((64, Tile(block_n, block_t, num_warps, each, False)) for each in (3, 4, 6))
    else:
        for block_n, block_t in ((128, 128), (128, 256)):
            yield from ((64, Tile(block_n, block_t, 8, each, False)) for each in (3, 4))
        yield from ((64, Tile(64, 256, 4, each, False)) for each in (3, 4))


def _launches_in_one_order(shape: tuple[int, int], rows: Sequence[int]) -> list[Launch]:
    """Returns all candidates for any number of rows that sum in the weight's own order."""
    own = default_launch(shape, 1)
    own_order = own.num_segments, own.block_k
    found = {launch for num_rows in rows for launch in candidates(shape, num_rows)}
    return sorted(launch for launch in found if (launch.num_segments, launch.block_k) == own_order)


def compile_all(launches: Iterable[Launch]) -> None:
    """Compiles kernels in processes of their own, into Triton's cache on disk; one process takes seconds for each."""
    num_processes = max(1, min(12, (os.cpu_count() or 1) - 2))
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, {_compiled_as(launch) for launch in launches}))


def _compiled_as(launch: Launch) -> Launch:
    """Returns the same for all launches that have one kernel."""
    return launch._replace(num_segments=2) if launch.tile.has_parallel_segments else launch


def _compile(launch: Launch) -> None:
    num_in = launch.num_segments * 128
    x, weight = torch.zeros(1, num_in, dtype=DTYPE, device="cuda"), torch.zeros(256, num_in, dtype=DTYPE, device="cuda")
    linear(_rows(x), weight, None, SumOrder(launch.block_k, 128), launch.tile)


def _multiplied_by(packed: TritonWeight | BatchInvariantWeight) -> Callable[[Tensor], Tensor]:
    return lambda x: packed.multiply(x, None)


def _multiplied_in_torch(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: torch_linear(x, weight)


def _launched(weight: Tensor, launch: Launch) -> Callable[[Tensor], Tensor]:
    return lambda x: linear(_rows(x), weight, None, launch.order(weight.shape[1]), launch.tile)


def _rows(x: Tensor) -> Rows:
    return Rows(x, x.dtype)


def _described(launch: Launch) -> str:
    num_segments, block_k, tile = launch
    how = "in parallel" if tile.has_parallel_segments else "in turn"
    sides = f"{tile.block_n} x {tile.block_t} x {block_k}"
    return f"{num_segments} segments {how}, {sides}, {tile.num_warps} warps, {tile.num_stages} stages"


def _difference_in_steps_of_128(x: Tensor, weight: Tensor, whole: Tensor) -> str:
    order = sum_order(weight.shape[0], weight.shape[1], DTYPE)
    result = linear(_rows(x[:16]), weight, None, order._replace(block_k=128), Tile(64, 16, 4, 3, False))
    return "the same" if torch.equal(result, whole[:16]) else "other bits"


def _error(num_out: int, num_in: int) -> float:
    """Returns the largest error of a random product, relative to the largest result."""
    x, weight = (torch.randn(size, num_in, dtype=DTYPE, device="cuda") for size in (64, min(num_out, 8192)))
    truth = x.double() @ weight.double().T
    return float((TritonWeight(weight).multiply(x, None) - truth).abs().max() / truth.abs().max())
