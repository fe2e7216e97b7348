"""`python -m benchmarks.cuda_attention`: paged attention of a layer of Llama 3.1 8B on this GPU.

For decode it prints the bytes of keys and values per second, for prefill the operations. `--sweep` tries other tiles
and numbers of parts. Whether tiles of decode give the bits of prefill is printed first. Steps run in a CUDA graph over
several caches, which no L2 cache holds.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.command import exit_with

if TYPE_CHECKING:
    from engine.kernels.cuda.attention_plan import Layer

DECODE = ((1, 1000), (1, 8000), (8, 1000), (16, 8000), (64, 1000), (128, 1000))
"""Sequences, and the length of their contexts."""
PREFILL = (512, 2048, 8192)
"""Tokens of one prompt."""
HEADS, KV_HEADS, SIZE, BLOCK_SIZE = 32, 8, 128, 16
DTYPE = torch.bfloat16
CACHED_BYTES = 300 << 20

Cut = tuple[tuple[int, int, int, int], int]
"""A `Tile`, and how many programs share its splits."""


def main(arguments: list[str] | None = None) -> int:
    """Prints speeds; returns 0. Does nothing where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_attention", description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try other tiles and numbers of parts")
    parser.add_argument("--kv-bits", type=int, choices=(16, 8, 4), default=16, help="bits of a number in the cache")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return 0
    from engine.kernels.cuda.attention_plan import decode_tile, prefill_tile
    from engine.kernels.cuda.decode_probe import is_decode_exact

    layer = _layer(options.kv_bits)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    print(f"{decode_tile(layer)} has the bits of {prefill_tile(layer)}: {is_decode_exact(layer)}")
    for (num_seqs, length), is_prefill in [*((point, False) for point in DECODE), *(((1, n), True) for n in PREFILL)]:
        attend = _Attention(layer, num_seqs, length, is_prefill)
        print(f"{'prefill' if is_prefill else 'decode'} {num_seqs:4} x {length:5}: {attend.speed(None)}", flush=True)
        for cut in _cuts(attend) if options.sweep else ():
            print(f"    {cut[0]}, {cut[1]} parts: {attend.speed(cut)}", flush=True)
    return 0


def _layer(kv_bits: int) -> "Layer":
    from engine.kernels.cuda.attention_plan import Layer

    device = torch.device("cuda", torch.cuda.current_device())
    return Layer(device, DTYPE, HEADS, KV_HEADS, SIZE, SIZE, kv_bits if kv_bits < 16 else 0)


def _cuts(attend: "_Attention") -> Iterator[Cut]:
    """Yields tiles and numbers of parts that may be good."""
    if attend.is_prefill:
        yield from itertools.product([(64, 64, 8, 2), (64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3)], [1])
        return
    fewest = max(1, 132 * 4 // (attend.num_seqs * KV_HEADS))
    tiles = [(16, 64, warps, stages) for warps in (4, 8) for stages in (2, 3, 4)] + [(16, 64, 2, 3)]
    yield from itertools.product([*tiles, (64, 64, 8, 3)], sorted({fewest, 4 * fewest}))


class _Attention:
    """Attention of one step, over several caches in turn."""

    def __init__(self, layer: "Layer", num_seqs: int, length: int, is_prefill: bool) -> None:
        from engine.kernels.cuda.decode_probe import random_rows

        self._layer, self.num_seqs, self.length, self.is_prefill = layer, num_seqs, length, is_prefill
        num_blocks = -(-length // BLOCK_SIZE)
        self._bytes = num_seqs * length * KV_HEADS * sum(layer.row_sizes) * layer.cache_dtype.itemsize
        count = max(1, min(64, CACHED_BYTES // self._bytes))
        chance = torch.Generator(layer.device)
        self._caches = [random_rows(layer, num_seqs * num_blocks, BLOCK_SIZE, chance) for _ in range(count)]
        order = torch.randperm(num_seqs * num_blocks, device="cuda")
        self._tables = order.view(num_seqs, num_blocks).int()
        num_tokens = length if is_prefill else num_seqs
        self._query = torch.randn(num_tokens, HEADS, SIZE, dtype=DTYPE, device="cuda")
        self._starts = torch.arange(num_seqs + 1, device="cuda").int() * (num_tokens // num_seqs)
        self._lengths = torch.full((num_seqs,), length, device="cuda").int()

    def speed(self, cut: Cut | None) -> str:
        """Returns how fast it is with this tile and number of parts, or as it runs."""
        from triton.runtime.errors import OutOfResources

        from benchmarks.cuda_timing import microseconds

        try:
            us = microseconds([functools.partial(self._run(cut), *cache) for cache in self._caches])
        except OutOfResources:
            return "needs more shared memory or registers than there are"
        if not self.is_prefill:
            return f"{us:8.1f} us {self._bytes / us / 1e3:7.0f} GB/s"
        return f"{us:8.1f} us {2 * HEADS * SIZE * self.length**2 / us / 1e6:7.0f} TFLOP/s"

    def _run(self, cut: Cut | None) -> Callable[[Tensor, Tensor], Tensor]:
        from engine.kernels.cuda.attention import attend_paged
        from engine.kernels.cuda.attention_plan import Plan, Tile, plan_for

        counts = len(self._query), self.num_seqs
        chosen = plan_for(self._layer, *counts, self.length, True)
        if cut is not None:
            chosen = Plan.of(self._layer, Tile(*cut[0]), *counts, cut[1])
        where = self._tables, self._starts, self._lengths, self.length
        return lambda keys, values: attend_paged(self._query, keys, values, *where, chosen, SIZE**-0.5)


if __name__ == "__main__":
    exit_with(main)
