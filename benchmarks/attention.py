"""`python -m benchmarks.attention`: paged attention on this CPU, against the machine's ceilings and against torch.

Decode should read keys and values once at the speed of memory, prefill should multiply at the speed of the cores. Both
ceilings are measured in the same run, so the shares hold on a busy machine, too. Every call takes another layer's KV
cache, as in a model, so that decode reads memory and not the last call's cache lines.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.command import exit_with
from engine.attention import AttentionMetadata, AttentionParams, LayerCache, cpu
from engine.kernels import load_kernels
from loadtest.numbers import positive, positive_number

DECODE = ((1, 4096), (8, 384), (32, 384), (32, 1024), (8, 4096))  # sequences x context
PREFILL = (512, 2048)  # tokens of one prompt
CACHE_BYTES = 256 << 20  # of all layers together


@dataclass(frozen=True)
class Case:
    """The shape of one layer's attention in a step; all sequences have as many queries and as long contexts."""

    num_queries: int  # per sequence
    num_seqs: int
    context_len: int
    heads: int
    kv_heads: int
    head_size: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def blocks_per_seq(self) -> int:
        return math.ceil(self.context_len / self.block_size)

    @property
    def num_blocks(self) -> int:
        return self.num_seqs * self.blocks_per_seq

    @property
    def bytes_read(self) -> int:
        entry = 2 * self.kv_heads * self.head_size * torch.empty(0, dtype=self.dtype).element_size()
        return self.num_seqs * self.context_len * entry

    @property
    def operations(self) -> int:
        """Multiplications and additions of all queries, each with the keys that it sees."""
        keys_seen = sum(range(self.context_len - self.num_queries + 1, self.context_len + 1))
        return 4 * self.num_seqs * keys_seen * self.heads * self.head_size


def metadata_of(case: Case) -> AttentionMetadata:
    """Returns the metadata of the case's step, with the blocks of its sequences in random order."""
    return AttentionMetadata(
        block_tables=torch.randperm(case.num_blocks, dtype=torch.int32).view(case.num_seqs, case.blocks_per_seq),
        cu_seqlens_q=torch.arange(case.num_seqs + 1, dtype=torch.int32) * case.num_queries,
        context_lens=torch.full((case.num_seqs,), case.context_len, dtype=torch.int32),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        max_seqlen_q=case.num_queries,
        max_context_len=case.context_len,
    )


class Step:
    """A case's tensors: queries, and the KV caches of several layers with their blocks in random order."""

    def __init__(self, case: Case) -> None:
        num_layers = max(2, min(64, CACHE_BYTES // case.bytes_read))
        size = (2, case.num_blocks, case.kv_heads, case.block_size, case.head_size)
        layers = [LayerCache(*torch.randn(size, dtype=case.dtype)) for _ in range(num_layers)]
        self.layers = itertools.cycle(layers)
        self.query = torch.randn(case.num_seqs * case.num_queries, case.heads, case.head_size, dtype=case.dtype)
        self.metadata = metadata_of(case)
        self.scaling = case.head_size**-0.5

    def kernel(self) -> Tensor:
        return cpu.paged_attention(self.query, next(self.layers), self.metadata, AttentionParams(self.scaling))

    def gather_and_sdpa(self) -> Tensor:
        """Attends like an engine without a kernel: copies the contexts out of their blocks, then calls torch's SDPA."""
        tables = self.metadata.block_tables.long()
        keys, values = (cache[tables].transpose(1, 2).flatten(2, 3) for cache in next(self.layers))
        context_len = self.metadata.max_context_len
        query = self.query.view(tables.shape[0], -1, *self.query.shape[1:]).transpose(1, 2)
        return scaled_dot_product_attention(
            query,
            keys[:, :, :context_len],
            values[:, :, :context_len],
            is_causal=query.shape[2] > 1,
            scale=self.scaling,
            enable_gqa=True,
        )


def best_seconds(call: Callable[[], object], budget_s: float) -> float:
    """Returns the time of the fastest call among those that fit into `budget_s`, at least one after a warm-up call."""
    call()
    best, end = math.inf, time.perf_counter() + budget_s
    while best == math.inf or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def read_bandwidth(budget_s: float) -> float:
    """Measures how many bytes per second all threads together read from memory."""
    buffer = torch.ones(CACHE_BYTES // 4)
    return CACHE_BYTES / best_seconds(buffer.sum, budget_s)


def matmul_peak(budget_s: float) -> float:
    """Measures the operations per second of torch's bfloat16 matmul."""
    a, b = torch.randn(2, 2048, 2048).bfloat16()
    return 2 * 2048**3 / best_seconds(lambda: a @ b, budget_s)


def main(arguments: list[str] | None = None) -> int:
    """Prints a table of cases; returns 1 when there are no kernels to measure."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("--heads", type=positive, default=14)
    parser.add_argument("--kv-heads", type=positive, default=2)
    parser.add_argument("--head-size", type=positive, default=64)
    parser.add_argument("--seconds", type=positive_number, default=1.0, help="spent on each measurement (default: 1)")
    parser.add_argument("--no-sdpa", action="store_true", help="leave out the comparison with gather + SDPA")
    options = parser.parse_args(arguments)
    kernels = load_kernels()
    if kernels is None:
        print("no CPU kernels: nothing to measure", file=sys.stderr)
        return 1
    peak_bytes, peak_operations = read_bandwidth(options.seconds), matmul_peak(options.seconds)
    print(f"kernels for {kernels.isa}, {torch.get_num_threads()} threads; measured ceilings: ", end="")
    print(f"read {peak_bytes / 1e9:.1f} GB/s, bf16 matmul {peak_operations / 1e9:.0f} GFLOP/s")
    print(f"{'':18}{'ms':>9}{'GB/s':>8}{'of read':>9}{'GFLOP/s':>9}{'of matmul':>11}{'vs gather+SDPA':>16}")
    layer = (options.heads, options.kv_heads, options.head_size)
    cases = {f"decode {n} x {context}": Case(1, n, context, *layer) for n, context in DECODE}
    cases |= {f"prefill {n}": Case(n, 1, n, *layer) for n in PREFILL}
    for name, case in cases.items():
        step = Step(case)
        seconds = best_seconds(step.kernel, options.seconds)
        bandwidth, speed = case.bytes_read / seconds, case.operations / seconds
        row = f"{name:18}{seconds * 1e3:9.3f}{bandwidth / 1e9:8.2f}{bandwidth / peak_bytes:9.0%}"
        row += f"{speed / 1e9:9.1f}{speed / peak_operations:11.0%}"
        if not options.no_sdpa:
            row += f"{best_seconds(step.gather_and_sdpa, options.seconds) / seconds:15.1f}x"
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    exit_with(main)
