"""`python -m benchmarks.kv_decode`: how many times less time decode's attention takes with KV in 8 or 4 bits.

The formats take turns, over caches of several layers that fit into no cache of the processor, with their blocks in
random order; of each the fastest call counts.
"""

import argparse
import itertools
import math
import sys
import time

import torch
from torch import Tensor

from benchmarks.attention import CACHE_BYTES, Case, metadata_of
from benchmarks.command import exit_with
from engine.attention import AttentionParams, LayerCache, cpu
from engine.attention.kv_format import KV_DTYPES, is_quantized, quantize
from engine.kernels import load_kernels
from loadtest.numbers import positive

SHAPES = ("8/2x64", "14/2x64", "8/8x64", "32/8x64", "16/2x128", "16/4x128", "32/8x128")
_CALLS_PER_TURN = 4
_NUM_DIFFERENT = 64  # blocks whose content differs


def shape(text: str) -> tuple[int, int, int]:
    """Returns heads, heads of keys, and the size of a head."""
    heads, size = text.split("x")
    num_heads, num_kv_heads = heads.split("/")
    return int(num_heads), int(num_kv_heads), int(size)


class Decode:
    """A step's attention in one layer after the other, over caches of one format."""

    def __init__(self, case: Case, format_name: str) -> None:
        num_layers = max(2, min(64, CACHE_BYTES // case.bytes_read))
        self._layers = itertools.cycle([self._layer(case, KV_DTYPES[format_name]) for _ in range(num_layers)])
        self._metadata = metadata_of(case)
        self._query = torch.randn(case.num_seqs, case.heads, case.head_size).bfloat16()
        self._params = AttentionParams(case.head_size**-0.5)
        self.best_s = math.inf

    def _layer(self, case: Case, dtype: torch.dtype) -> LayerCache:
        numbers = torch.randn(2, _NUM_DIFFERENT, case.kv_heads, case.block_size, case.head_size)
        rows = quantize(numbers, dtype) if is_quantized(dtype) else numbers.to(dtype)
        num_repeats = -(-case.num_blocks // _NUM_DIFFERENT)
        keys, values = (each.repeat(num_repeats, 1, 1, 1)[: case.num_blocks].contiguous() for each in rows)
        return LayerCache(keys, values)

    def run(self) -> Tensor:
        return cpu.paged_attention(self._query, next(self._layers), self._metadata, self._params)

    def time(self) -> None:
        for _ in range(_CALLS_PER_TURN):
            start = time.perf_counter()
            self.run()
            self.best_s = min(self.best_s, time.perf_counter() - start)


def measure(case: Case, num_rounds: int) -> dict[str, float]:
    """Returns the seconds of each format's fastest call."""
    steps = {name: Decode(case, name) for name in KV_DTYPES}
    for step in steps.values():
        step.run()
    for _ in range(num_rounds):
        for step in steps.values():
            step.time()
    return {name: step.best_s for name, step in steps.items()}


def main(arguments: list[str] | None = None) -> int:
    """Prints a row for each shape; returns 1 when there are no kernels to measure."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kv_decode", description=(__doc__ or "").partition(": ")[2].partition("\n")[0]
    )
    parser.add_argument("shapes", nargs="*", default=SHAPES, help=f"heads/heads of keys x size (default: {SHAPES})")
    parser.add_argument("--sequences", type=positive, default=8, help="at once (default: 8)")
    parser.add_argument("--context", type=positive, default=8000, help="tokens of each (default: 8000)")
    parser.add_argument("--rounds", type=positive, default=5, help="in which each format has a turn (default: 5)")
    options = parser.parse_args(arguments)
    kernels = load_kernels()
    if kernels is None:
        print("no CPU kernels: nothing to measure", file=sys.stderr)
        return 1
    print(f"kernels for {kernels.isa}, {torch.get_num_threads()} threads")
    for text in options.shapes:
        case = Case(1, options.sequences, options.context, *shape(text))
        seconds = measure(case, options.rounds)
        plain = seconds["bfloat16"]
        figures = (f"{name} {each * 1e3:.2f} ms, {plain / each:.2f}x" for name, each in seconds.items())
        print(f"{text:10}" + "   ".join(figures), flush=True)
    return 0


if __name__ == "__main__":
    exit_with(main)
